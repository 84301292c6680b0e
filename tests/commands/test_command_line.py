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
from hybrid_imagenet.benchmarks.__main__ import BENCHMARKS
from hybrid_imagenet.cluster.environment import Placement
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.options import SPELLING
from tests.commands.report.synthetic import make_run
from tests.ranks import ROOT
from tests.support import fresh

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
    message = r"--bad_records=x is not valid\. Choose one of fail, skip"
    with pytest.raises(UserError, match=message):
        parser().parse_args(["--to=x", "--bad-records=x"])


# A wrong command line, in a directory with the run `runs/a`, and a part of its error. The tests of
# a command have its other errors.
WRONG_COMMAND_LINES = (
    ("trian", "There is no command trian (did you mean train?). Choose one of demo, train, "),
    ("train nonsense", "Unexpected argument: nonsense. Write flags as --name=value."),
    ("train --epoch=3", "There is no flag --epoch (did you mean --epochs?). See --help."),
    ("train --epochs", "--epochs has no value. Write --epochs=VALUE."),
    ("train --epochs=x", "--epochs=x is not valid. Use a number."),
    ("train --epochs=-1", "--epochs=-1 is not valid. Use a value above 0."),
    ("train --optimizer=labm", "lamb, muon (did you mean lamb?)."),
    ("train --dataset=folder --data_dir=none", "--data_dir=none is not a directory. Set it to"),
    ("train --dataset=folder --data_dir=file", "--data_dir=file is not a directory. Set it to"),
    ("train -n 2", "Run hybrid-imagenet run -np 2 -- TRAIN_FLAGS"),
    ("train --lr=1 --nproc-per-node=2", "Run hybrid-imagenet run --nproc_per_node 2 -- --lr=1"),
    ("run -np", "-np has no value. Write -np N. See hybrid-imagenet run --help."),
    ("run -np x", "-np x is not valid. Use a whole number. See hybrid-imagenet run --help."),
    ("run --nproc_per_node=x", "--nproc_per_node=x is not valid. Use a whole number, or gpu."),
    ("run --ssh_port", "--ssh_port has no value. Write --ssh_port=PORT."),
    ("run runs", "runs is neither an option of run nor a script, whose name ends in .py. Write"),
    ("run -H a:b", "-H a:b is not valid: 'a:b' is not HOST or HOST:SLOTS. Write HOST:SLOTS,..."),
    (
        "run -H [::1]:2",
        "'[::1]:2' is an IPv6 address, which is not supported. Use a name or an IPv4",
    ),
    (
        "run -H fe80::1",
        "'fe80::1' is an IPv6 address, which is not supported. Use a name or an IPv4",
    ),
    ("run --hosts= -- --epochs=1", "-H has no value. Write -H HOST:SLOTS,..., or omit -H."),
    ("resume runs/a --hosts=", "-H has no value. Write -H HOST:SLOTS,..., or omit -H."),
    ("resume", "RUN is missing. See hybrid-imagenet resume --help."),
    ("resume none", "none is not a directory. Pass the directory of a run."),
    ("resume runs", "runs is not a run, because it has no config.json. List the runs in it with"),
    ("runs a b", "Unexpected argument: b. See hybrid-imagenet runs --help."),
    ("runs --diff a", "--diff needs 2 values. Write --diff RUN RUN."),
    ("runs none", "none contains no runs. Pass the directory that contains them."),
    ("status file", "file is not a directory. Pass the directory of a run."),
    ("status empty", "empty is not a run, because it has no config.json. Pass the directory of a"),
    ("stop", "RUN is missing. See hybrid-imagenet stop --help."),
    ("evaluate --datset=digits", "There is no option --datset (did you mean --dataset?)."),
    ("evaluate none --dataset=digits", "none does not exist. Pass a checkpoint"),
    ("evaluate empty --dataset=digits", "empty has no usable checkpoint"),
    (
        "evaluate runs/a --image_size=8193",
        "--image_size=8193 is not valid. Use a whole number from",
    ),
    ("evaluate runs/a --per_gpu_batch=65537", "=65537 is not valid. Use a whole number from 1 to"),
    ("predict runs/a", "IMAGE is missing. See hybrid-imagenet predict --help."),
    ("predict runs/a x.png --top=0", "--top=0 is not valid. Use a whole number of at least 1."),
    ("export", "RUN and --to=FILE are missing. See hybrid-imagenet export --help."),
    ("data", "COMMAND is missing. Choose one of prepare, check. See hybrid-imagenet data --help."),
    ("data prepar", "no command hybrid-imagenet data prepar (did you mean prepare?). Choose one"),
    ("data prepare --from=none --to=out", "--from=none is unknown. Use folder, tfrecord,"),
    ("data check --dataset=digits --split=x", "--split=x is not valid. Choose one of train, val"),
    ("doctor x", "Unexpected argument: x. See hybrid-imagenet doctor --help."),
    ("env x", "Unexpected argument: x. See hybrid-imagenet env --help."),
    ("plan --gpus_per_hosts=8", "There is no flag --gpus_per_hosts (did you mean --gpus_per_host"),
    ("plan --speed=none", "--speed=none could not be read: No such file or directory. Choose auto"),
    ("report", "RUN is missing. See hybrid-imagenet report --help."),
    ("report runs/a --out=file", "--out=file could not be written: File exists. Choose another"),
    ("bench inptu", "There is no benchmark inptu (did you mean input?). Choose one of input, "),
    ("bench input --source=none", "--source=none is unknown. Use folder, tfrecord,"),
    ("bench input --json=runs", "--json=runs is a directory. Use the name of a file."),
    ("demo x", "Unexpected argument: x. See hybrid-imagenet demo --help."),
)


@pytest.fixture(scope="module")
def directory_with_a_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wrong")
    make_run(directory / "runs" / "a", epochs=1)
    (directory / "empty").mkdir()
    (directory / "file").write_text("text")
    return directory


@pytest.mark.parametrize(("line", "message"), WRONG_COMMAND_LINES)
def test_main_with_a_wrong_command_line_prints_one_line_with_a_remedy(
    line, message, directory_with_a_run, monkeypatch, capsys
):
    monkeypatch.chdir(directory_with_a_run)
    assert program.main(line.split()) == 2
    output, error = capsys.readouterr()
    assert error.startswith("error: ") and message in error
    assert (output, error.count("\n")) == ("", 1)


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_run_command_prints_a_shared_error_on_rank_0_only(rank, lines, capsys, monkeypatch):
    monkeypatch.setattr(command_line.comm, "read_placement", lambda: Placement(rank, 2, rank, 2))
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


def test_commands_with_a_closed_pipe_end_without_an_error(tmp_path):
    for words in (["report", make_run(tmp_path / "run")], ["data", "--help"]):
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "hybrid_imagenet", *words]
        with open(writer, "wb") as output:
            result = subprocess.run(
                command, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True
            )
        assert (result.returncode, result.stderr) == (0, "")


def test_commands_outside_the_environment_print_how_to_enter_it(tmp_path):
    # Python runs without its site-packages here, like the Python of a system.
    for start in (
        ["hybrid_imagenet.main"],
        ["hybrid_imagenet", "train"],
        ["hybrid_imagenet", "evaluate", "x"],
    ):
        result = subprocess.run(
            [sys.executable, "-I", "-S", OUTSIDE, str(ROOT), *start],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 2
        assert re.fullmatch(
            rf"error: {re.escape(sys.executable)} has no module (absl|ml_dtypes|numpy), because"
            r" this Python is not the environment of the program\. "
            rf"First run cd {re.escape(str(ROOT))}, (launch/setup.sh, )?\."
            r" launch/env.sh\n",
            result.stderr,
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
from hybrid_imagenet.comm import process
from hybrid_imagenet.cluster import quiet
from hybrid_imagenet.commands import command_line

assert main(["train", "--dataset=synthetic"]) == 2
assert main(["run", "-np", "2", "--", "--dataset=synthetic"]) == 2
assert command_line.run_command(lambda arguments: quiet.import_tensorflow(), []) == 2
process.init()
"""


def test_commands_without_tensorflow_print_how_to_install_it(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TENSORFLOW], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    message = (
        f"TensorFlow is not installed in {sys.executable}. In the checkout of this program, run pip"
        " install '.[cpu]', or pip install '.[gpu]' for NVIDIA GPUs"
    )
    lines = [line for line in result.stderr.splitlines() if "TensorFlow is not" in line]
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
    run = make_run(tmp_path / "run", epochs=2)
    url = "s3://bucket/x.onnx"
    assert program.main([word.format(run=run, url=url) for word in words]) == 2
    assert f"={url} is a URL, but a local path is needed" in capsys.readouterr().err


HELP = (
    *([command] for command in sorted(program.COMMANDS)),
    *(["data", name] for name in ("prepare", "check")),
    *(["bench", name] for name in sorted(BENCHMARKS)),
)


@pytest.mark.parametrize("columns", [60, 140])
@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_help_of_every_command_is_complete(words, columns, monkeypatch, capsys):
    # Help has a usage line, a description, examples, and the text of each option.
    monkeypatch.setenv("COLUMNS", str(columns))
    with contextlib.suppress(SystemExit):
        program.main([*words, "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: hybrid-imagenet {words[0]}")
    _, description, *_ = text.split("\n\n")
    assert description.rstrip()[-1] in ".:"
    examples = re.findall(r"^ +(?:hybrid-imagenet|watch) .*$", text, re.M)
    assert len(examples) >= 2
    assert SPELLING in " ".join(text.split())
    # Names of options have underscores, and each is followed by its text.
    assert not re.search(r"^  --[a-z_]+-[a-z]", text, re.M)
    for name in re.findall(r"^  -.*\n(?!      )", text, re.M):
        assert " " in name.strip("\n -"), name
    assert "(default " not in text and "; default " not in text
    assert "(%" not in text
    lines = [line for line in text.splitlines() if line not in examples and "--" not in line]
    assert max(map(len, lines)) <= columns


def test_list_of_commands_fits_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    assert program.main([]) == 2
    text = "".join(capsys.readouterr())
    assert max(map(len, text.splitlines())) <= 60
    assert re.findall(r"^  ([a-z]+) ", text, re.M) == list(program.COMMANDS)


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
    text = capsys.readouterr().out
    assert f"\n{example}\n" in text
    assert "`hybrid-imagenet bench allreduce --sizes=1M,64M`" in text
    assert max(len(line) for line in text.splitlines() if "--" not in line) <= 50


def test_commands_escape_control_characters_in_names(tmp_path, monkeypatch, capsys):
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
        output, error = capsys.readouterr()
        text = (output + error).replace("\n", "")
        assert text.isprintable() and text, (words, text)


@pytest.mark.parametrize(
    "command", ["evaluate", "predict", "export", "report", "status", "stop", "resume"]
)
def test_commands_on_a_run_call_their_argument_run(command, capsys):
    with pytest.raises(SystemExit):
        program.main([command, "--help"])
    usage, *rest = capsys.readouterr().out.splitlines()
    assert " RUN" in usage and "CHECKPOINT" not in usage
    assert "  RUN" in rest and any("directory of a run" in line for line in rest)
