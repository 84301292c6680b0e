"""Tests what all commands share: help, errors, and both spellings of a flag."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_imagenet import __main__ as program
from hybrid_imagenet.comm.environment import Placement
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.options import SPELLING
from hybrid_imagenet.tools import command_line
from tests.ranks import ROOT
from tests.support import fresh
from tests.tools.report.synthetic import make_run

OUTSIDE = Path(__file__).parent / "outside.py"


def parser():
    result = command_line.Parser("try", "Tries.")
    result.add_argument(
        "--bad_records", choices=("fail", "skip"), default="fail", help="end, or leave out"
    )
    result.add_argument("--to", required=True, metavar="FILE", help="new file")
    result.add_argument("images", nargs="*", metavar="IMAGE")
    return result


def test_parser_accepts_dashes_and_underscores():
    parsed = parser().parse_args(["--bad-records=skip", "--to=a-b"])
    assert (parsed.bad_records, parsed.to) == ("skip", "a-b")
    assert parser().parse_args(["--to=x", "--", "--not-mine=1"]).images == ["--not-mine=1"]


def test_parser_error_names_the_choices():
    message = r"--bad_records: x is not valid\. Choose one of fail, skip"
    with pytest.raises(UserError, match=message):
        parser().parse_args(["--to=x", "--bad-records=x"])


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["trian"], "train"),
        (["train", "--epoch=3"], "--epochs"),
        (["train", "--optimizer=labm"], "lamb"),
        (["evaluate", "--datset=digits"], "--dataset"),
        (["data", "prepar"], "prepare"),
        (["plan", "--gpus_per_hosts=8"], "--gpus_per_host"),
        (["bench", "inptu"], "input"),
    ],
)
def test_main_mistyped_word_suggests_the_nearest(words, near, capsys):
    assert program.main(words) == 2
    assert f"did you mean {near}" in capsys.readouterr().err


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_run_command_shared_error_is_printed_by_rank_0_alone(rank, lines, capsys, monkeypatch):
    monkeypatch.setattr(command_line.comm, "placement", lambda: Placement(rank, 2, rank, 2))
    # One of several ranks ends by os._exit, which would end the tests.
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as end:
        command_line.run_command(
            lambda words: parser().parse_args(words), ["--to=x", "--bad-records=x"]
        )
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == lines


def test_run_command_under_another_launcher_prints_one_line(capsys, monkeypatch):
    monkeypatch.setenv("FLUX_JOB_SIZE", "2")
    monkeypatch.setenv("FLUX_TASK_RANK", "1")
    assert (
        command_line.run_command(lambda words: command_line.start_single_process("predict"), [])
        == 2
    )
    output = capsys.readouterr().err
    assert output.startswith(
        "error: FLUX_JOB_SIZE=2 and FLUX_TASK_RANK=1 say that Flux has started several processes"
    )
    assert output.count("\n") == 1


def test_commands_closed_pipe_ends_without_an_error(tmp_path):
    for words in (["report", make_run(tmp_path / "run")], ["data", "--help"]):
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "hybrid_imagenet", *words]
        with open(writer, "wb") as output:
            done = subprocess.run(
                command, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True
            )
        assert (done.returncode, done.stderr) == (0, "")


def test_commands_outside_the_environment_print_how_to_enter_it(tmp_path):
    """Runs Python without its site-packages, like the Python of a system."""
    for start in (
        ["hybrid_imagenet.main"],
        ["hybrid_imagenet", "train"],
        ["hybrid_imagenet", "evaluate", "x"],
    ):
        done = subprocess.run(
            [sys.executable, "-I", "-S", OUTSIDE, str(ROOT), *start],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        assert re.fullmatch(
            rf"error: {re.escape(sys.executable)} has no module (absl|numpy), because this Python"
            r" is not the environment of the program\. "
            rf"First run cd {re.escape(str(ROOT))}, (launch/setup.sh, )?\."
            r" launch/env.sh\n",
            done.stderr,
        )


WITHOUT_TENSORFLOW = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name == "tensorflow" else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
from hybrid_imagenet.__main__ import main
from hybrid_imagenet.comm import process, quiet
from hybrid_imagenet.tools import command_line

assert main(["train", "--dataset=synthetic"]) == 2
assert main(["run", "-np", "2", "--", "--dataset=synthetic"]) == 2
assert command_line.run_command(lambda arguments: quiet.import_tensorflow(), []) == 2
process.init()
"""


def test_commands_without_tensorflow_print_how_to_install_it(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TENSORFLOW], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    message = (
        f"TensorFlow is not installed in {sys.executable}. In the checkout of this program, run pip"
        " install '.[cpu]', or pip install '.[gpu]' for NVIDIA GPUs"
    )
    lines = [line for line in done.stderr.splitlines() if "TensorFlow is not" in line]
    assert lines == [f"error: {message}"] * 3 + [f"ModuleNotFoundError: {message}"]
    assert not list(tmp_path.iterdir())


def test_commands_that_compute_nothing_do_not_load_tensorflow(tmp_path):
    run = str(make_run(tmp_path / "run", epochs=2))
    lines = (["runs", str(tmp_path)], ["status", run], ["report", run], ["plan", "--cluster=abci"])
    codes, loaded, _ = fresh.run(*(("hybrid_imagenet.__main__", line) for line in lines))
    assert codes == [0] * len(lines)
    assert not loaded & fresh.FRAMEWORKS


@pytest.mark.parametrize(
    "words",
    [
        ("report", "{run}", "--out={url}"),
        ("export", "{run}", "--to={url}"),
        ("doctor", "--run_dir={url}"),
        ("bench", "gpu", "--out={url}"),
        ("data", "prepare", "--from=digits", "--to={url}"),
    ],
)
def test_commands_reject_a_url_as_output(words, tmp_path, capsys):
    run, url = make_run(tmp_path / "run", epochs=2), "s3://bucket/x.onnx"
    assert program.main([word.format(run=run, url=url) for word in words]) == 2
    assert f"={url} is a URL, but a local path is needed" in capsys.readouterr().err


@pytest.mark.parametrize("command", sorted(set(program.COMMANDS) - {"bench"}))
def test_help_of_every_command_has_the_common_layout(command, capsys):
    try:
        code = program.main([command, "--help"])
    except SystemExit as end:
        code = end.code
    text = capsys.readouterr().out
    assert code in (0, None)
    assert text.startswith("usage: ")
    flags = re.findall(r"^  --(\[no\])?([a-z_0-9]+)(=\S+)?$", text, re.M)
    # These commands take words and no flags.
    assert flags or command in ("data", "runs", "status", "stop")
    assert not re.search(r"^  --[a-z_]+-[a-z]", text, re.M)


# bench and data have subcommands, see the next test.
@pytest.mark.parametrize("command", sorted(set(program.COMMANDS) - {"bench", "data"}))
def test_help_of_every_command_says_that_dashes_and_underscores_mean_the_same(command, capsys):
    with contextlib.suppress(SystemExit):
        program.main([command, "--help"])
    assert SPELLING in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", [["data", "prepare"], ["bench", "input"]])
def test_help_of_subcommands_says_that_dashes_and_underscores_mean_the_same(words, capsys):
    with contextlib.suppress(SystemExit):
        program.main([*words, "--help"])
    assert SPELLING in " ".join(capsys.readouterr().out.split())


def test_help_in_a_narrow_terminal_keeps_commands_on_one_line(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "50")
    example = "  hybrid-imagenet train --dataset=folder --data_dir=photos --val_fraction=0.2"
    option = (
        "compare with `hybrid-imagenet bench allreduce --sizes=1M,64M` before a long run on many"
        " hosts"
    )
    narrow = command_line.Parser("try", "Tries.", epilog=f"Examples:\n{example}")
    narrow.add_argument("--ranks", help=option)
    narrow.print_help()
    shown = capsys.readouterr().out
    assert f"\n{example}\n" in shown
    assert "`hybrid-imagenet bench allreduce --sizes=1M,64M`" in shown
    assert max(len(line) for line in shown.splitlines() if "--" not in line) <= 50


def test_every_command_escapes_control_characters_in_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = make_run(
        tmp_path / "a\x1b[2Jred\u202e\n", epochs=3, recipe="\x1b]0;title\x07", finished=False
    )
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"hosts": ["\x1b[31mhost"] * 2}))
    folder = tmp_path / "photos"
    (folder / "train" / "cat\x1b[31m").mkdir(parents=True)
    (folder / "train" / "cat\x1b[31m" / "no\x1bimage.jpg").write_bytes(b"damaged")
    for words in (
        ["runs", "."],
        ["runs", "--diff", run.name, run.name],
        ["status", run.name],
        ["stop", run.name],
        ["report", "--text", run.name],
        ["report", run.name],
        ["resume", run.name, "--dry_run"],
        ["evaluate", run.name, "--dataset=digits"],
        ["predict", run.name, "a\x1b.png"],
        ["export", run.name, "--to=x\x1b.onnx"],
        ["data", "check", "--dataset=folder", f"--data_dir={folder}", "--split=train"],
        ["train", "--dataset=folder", f"--data_dir={folder}", "--check_only"],
    ):
        program.main(words)
        shown = capsys.readouterr()
        text = (shown.out + shown.err).replace("\n", "")
        assert text.isprintable() and text, (words, text)


@pytest.mark.parametrize(
    "command", ["evaluate", "predict", "export", "report", "status", "stop", "resume"]
)
def test_every_command_on_a_run_calls_its_argument_run(command, capsys):
    with pytest.raises(SystemExit):
        program.main([command, "--help"])
    usage, *rest = capsys.readouterr().out.splitlines()
    assert " RUN" in usage and "CHECKPOINT" not in usage
    assert "  RUN" in rest and any("directory of a run" in line for line in rest)
