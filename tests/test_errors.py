"""Tests of `hybrid_imagenet.errors`."""

import json

import pytest

from hybrid_imagenet import config, errors, run_plan
from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.errors import (
    SharedError,
    UserError,
    missing_module_message,
    missing_tensorflow_message,
    printable,
    without_secrets,
)
from hybrid_imagenet.training.recorder import Recording


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://ann:hunter2@host/data", "https://***@host/data"),
        ("s3://KEYID@bucket/x", "s3://***@bucket/x"),
        ("https://u:p@ss@h/x", "https://***@h/x"),
        ("http:/u:p@h/x", "http:/***@h/x"),
        ("https://u:p#?@h/x", "https://***@h/x"),
        ("https://u:pa/ss@h/x", "https://***@h/x"),
        ("s3://KEY:sec/ret@b/x", "s3://***@b/x"),
        ("s3://KEY:12/ret@b", "s3://***@b"),
        ("https://h1/a https://u:p@h2/b", "https://h1/a https://***@h2/b"),
        ("hf://hf_abcdefghijklmnopqrstuvwx@datasets/o/n", "hf://***@datasets/o/n"),
        ("HF_TOKEN hf_AbCdEfGhIjKlMnOpQrStUvWx, used", "HF_TOKEN hf_***, used"),
        ("https://h/d?x=1&token=abc&y=2", "https://h/d?x=1&token=***&y=2"),
        ("https://h/d?X-Amz-Signature=abc", "https://h/d?X-Amz-Signature=***"),
        ("https://h/d?ACCESS_KEY=abc more", "https://h/d?ACCESS_KEY=*** more"),
        ("ann@host:/data", "ann@host:/data"),
        ("/data/token=5/x", "/data/token=5/x"),
        ("https://host/a@b", "https://host/a@b"),
        ("https://host:8080/a@b", "https://host:8080/a@b"),
        ("http://[::1]:80/a@b", "http://[::1]:80/a@b"),
        ("hf://datasets/owner/name@main/x", "hf://datasets/owner/name@main/x"),
        ("/data/hf_datasets", "/data/hf_datasets"),
    ],
)
def test_without_secrets_masks_secrets_and_nothing_else(text, expected):
    assert without_secrets(text) == expected
    assert (
        str(UserError(f"--data_dir={text}: no such directory"))
        == f"--data_dir={expected}: no such directory"
    )
    assert str(SharedError(text)) == expected


def test_user_error_message_is_one_printable_line():
    assert str(UserError("a\nb\x1b[31mc\ud800")) == "a\\nb\\x1b[31mc\\ud800"
    long = str(UserError("start " + "x" * 10000 + " remedy"))
    assert len(long) < 2100
    assert long.startswith("start ")
    assert long.endswith(" remedy")


def test_printable_masks_secrets():
    assert printable("https://ann:hunter2@host/a\x1b") == "https://***@host/a\\x1b"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Python decodes file names like this in the C locale.
        ("caf\udcc3\udca9", "caf\u00e9"),
        ("caf\u00e9 \u732b", "caf\u00e9 \u732b"),
        ("bad\udcff", "bad\\udcff"),
        ("lone\ud800 caf\udcc3\udca9", "lone\\ud800 caf\\udcc3\\udca9"),
        ("left\u202eright", "left\\u202eright"),
        ("a\nb\tc", "a\\nb\\tc"),
    ],
)
def test_printable_of_any_bytes_is_readable_or_escaped(text, expected):
    assert printable(text) == expected


def test_recording_writes_no_secrets_into_files_or_output(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "from-the-environment")
    secret = "https://ann:hunter2@host/data?token=abcdef"
    flags = [f"--data_dir={secret}", f"--run_dir={tmp_path / 'run'}", "--progress=plain"]
    recording = Recording(run_plan.make(config.resolve(flags)), 0, 1)
    facts = {"train_images": 1, "validation_images": 1, "world_size": 1, "precision": "float32"}
    recording.start(facts, {"step": 0, "epochs": 0.0}, RunState())
    recording.writer.close()
    recording.stop_logging()
    written = "".join(path.read_text() for path in (tmp_path / "run").iterdir()) + "".join(
        capsys.readouterr()
    )
    assert json.loads((tmp_path / "run" / "config.json").read_text())["flags"][
        "data_dir"
    ].startswith("https://***@")
    for word in ("hunter2", "abcdef", "from-the-environment"):
        assert word not in written


def test_missing_module_message_of_an_installation_names_no_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "hybrid_imagenet" / "errors.py"))
    assert "Run pip install tensorflow-cpu, or pip" in missing_tensorflow_message()
    message = missing_module_message(ModuleNotFoundError(name="absl"))
    assert message.endswith(", or install the package of the module with pip")
    assert "launch/" not in message
