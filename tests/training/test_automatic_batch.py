"""--per_gpu_batch=auto: real trials with a small network, and what several ranks make of their numbers."""

import json
import re

import pytest

from hybrid_imagenet import config
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.config import derived
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.training import automatic_batch, resumed_flags

FLAGS = ["--model=resnet18", "--image_size=32", "--augmentation=digits", "--per_gpu_batch=auto"]


class Ranks(SingleProcess):
    """Rank 0 of three, whose other ranks found other batches."""

    def __init__(self, others=()):
        super().__init__()
        self.others = list(others)

    def allgather_object(self, obj):
        return [obj, *self.others] if isinstance(obj, int) else [obj]


def settle(flags, examples=1500, ranks=None):
    given = config.resolve([*FLAGS, *flags])
    earlier = resumed_flags.description(given)
    return automatic_batch.settle(given, ranks or SingleProcess(), "float32", 10, examples, earlier)


@pytest.mark.slow
def test_a_real_network_within_a_memory_limit():
    limit = 1.6  # TensorFlow alone takes 0.8 to 1.1, as it was installed
    settled, note = settle([f"--memory_limit_gb={limit}", "--ema_decay=0.9"])
    tried = {int(b): float(gb) for b, gb in re.findall(r"(\d+): ([\d.]+) GB", note)}
    batch = settled.per_gpu_batch
    assert batch % 8 == 0 and batch in tried
    assert tried[batch] <= limit + 0.01
    assert batch == 1496 or tried[batch + 8] >= limit - 0.01
    assert f"--per_gpu_batch=auto: {batch} images within {limit} GB" in note
    assert json.loads(settled.to_json())["per_gpu_batch"] == batch


def test_the_least_of_all_ranks_counts(monkeypatch):
    monkeypatch.setattr(automatic_batch, "_find", lambda *_: (64, " found"))
    settled, note = settle([], ranks=Ranks([48, 56, None]))
    assert settled.per_gpu_batch == 48
    assert note.startswith("--per_gpu_batch=auto: 48 images")


def test_a_resumed_run_keeps_its_number(tmp_path, monkeypatch):
    monkeypatch.setattr(automatic_batch, "_find", lambda *_: (64, " found"))
    (tmp_path / "config.json").write_text(json.dumps({"flags": {"per_gpu_batch": 40}}))
    assert settle([f"--run_dir={tmp_path}", "--resume"])[0].per_gpu_batch == 40
    assert settle([f"--run_dir={tmp_path}"])[0].per_gpu_batch == 64
    assert settle([f"--run_dir={tmp_path / 'none'}", "--resume"])[0].per_gpu_batch == 64


def test_a_batch_found_after_the_ranks_are_connected_groups_none_of_them(monkeypatch):
    """Groups of ranks for normalization are made when they connect, before the batch is known."""
    monkeypatch.setattr(automatic_batch, "_find", lambda *_: (32, " found"))
    for flags, group in ([], 1), (["--bn_group=2"], 2):
        settled, _ = settle(["--recipe=mlperf_lars", *flags])
        assert derived.settle(settled, 1024).bn_group == group


def test_a_number_stays_as_it_is():
    given = config.resolve([*FLAGS, "--per_gpu_batch=24"])
    assert automatic_batch.settle(given, SingleProcess(), "float32", 10, 1500, {}) == (given, "")


def test_no_room_for_one_image_is_one_line(monkeypatch):
    monkeypatch.setattr(automatic_batch._Trials, "measure", lambda self, batch: 3e9)
    with pytest.raises(UserError, match=r"not even one image fits within 2 GB \(tried 1: 3\.00 GB.*--memory_limit_gb"):
        settle(["--memory_limit_gb=2"])


def test_a_trial_that_fails_otherwise_says_so(monkeypatch):
    monkeypatch.setattr(automatic_batch.sys, "executable", "/bin/false")
    with pytest.raises(UserError, match=r"--per_gpu_batch=auto: .*exit code 1"):
        settle([])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--batch_schedule=3:64"], "--per_gpu_batch=auto does not go with --batch_schedule"),
        (["--per_gpu_batch=0"], "--per_gpu_batch=0: must be at least 1"),
        (["--per_gpu_batch=most"], "--per_gpu_batch=most: give a whole number or auto"),
        (["--per_gpu_batch=8", "--memory_limit_gb=1"], "--memory_limit_gb=1 goes with --per_gpu_batch=auto only"),
    ],
)
def test_mistakes_are_one_line(flags, words):
    with pytest.raises(UserError) as caught:
        config.resolve([*FLAGS, *flags])
    assert words in str(caught.value)
