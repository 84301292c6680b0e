"""What bash completes, by running its function."""

import subprocess

import pytest

from hybrid_imagenet import recipes
from hybrid_imagenet.__main__ import COMMANDS, main
from hybrid_imagenet.config import OPTIONS
from hybrid_imagenet.optimizers.registry import OPTIMIZERS


@pytest.fixture
def script(tmp_path, capsys):
    assert main(["completion"]) == 0
    path = tmp_path / "script.bash"
    path.write_text(capsys.readouterr().out)
    return path


def completed(script, *lines):
    """The words offered for each line."""
    code = f'source {script}\nfor line in "$@"; do COMP_LINE=$line COMP_POINT=${{#line}}; _hybrid_imagenet\n'
    code += 'echo "${COMPREPLY[*]}"; done'
    done = subprocess.run(["bash", "-c", code, "bash", *lines], capture_output=True, text=True, cwd=script.parent)
    assert (done.returncode, done.stderr) == (0, "")
    return [words.split() for words in done.stdout.splitlines()]


def test_bash_completes(script):
    expected = {
        "hybrid-imagenet ": list(COMMANDS),
        "hybrid-imagenet ev": ["evaluate"],
        "hybrid-imagenet train --optim": ["--optimizer="],
        "hybrid-imagenet train --per-gpu": ["--per_gpu_batch="],
        "hybrid-imagenet train --optimizer=": list(OPTIMIZERS),
        "hybrid-imagenet train --seed=1 --lr-schedule=sony_": ["sony_a", "sony_b"],
        "hybrid-imagenet train --recipe=fl": [n for n in recipes.names() if n.startswith("fl")],
        "hybrid-imagenet run -np 2 -- --nozero": ["--nozero_last_gamma"],
        "hybrid-imagenet report scr": ["script.bash"],
        "hybrid-imagenet train --flagfile=scr": ["script.bash"],
    }
    assert dict(zip(expected, completed(script, *expected), strict=True)) == expected


def test_every_flag_of_training_is_offered(script):
    offered = {word.removeprefix("--").rstrip("=") for word in completed(script, "hybrid-imagenet train --")[0]}
    assert offered >= set(OPTIONS)
