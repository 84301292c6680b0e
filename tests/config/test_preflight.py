"""What ends a run is told before TensorFlow is loaded, also by --check_only."""

import subprocess
import sys

import pytest

from hybrid_imagenet import config
from hybrid_imagenet.config import preflight
from hybrid_imagenet.errors import UserError

DIGITS = ("--dataset=digits", "--augmentation=digits")


@pytest.fixture
def bare(monkeypatch):
    """An environment without packages of the kind that flags ask for."""
    monkeypatch.setattr(preflight, "_installed", lambda module: False)


@pytest.mark.parametrize(
    ("flags", "ranks", "text"),
    [
        (["--per_gpu_batch=1501"], 1, "a batch of 1501"),
        (["--per_gpu_batch=501"], 3, "on 3 GPUs make a batch of 1503"),
        (["--per_gpu_batch=1401", "--tuning_split=100"], 1, "1400 training images"),
        (["--decoder=dali"], 1, "--decoder=dali: NVIDIA DALI is not installed"),
        (["--tracker=wandb"], 1, "--tracker=wandb: not installed; pip install wandb"),
    ],
)
def test_what_cannot_train_is_refused(bare, flags, ranks, text):
    with pytest.raises(UserError, match=text):
        preflight.check(config.resolve([*DIGITS, *flags]), ranks)


@pytest.mark.parametrize("flags", [["--per_gpu_batch=1500"], ["--per_gpu_batch=auto"], ["--per_gpu_batch=500"]])
def test_what_can_train_is_not(bare, flags):
    preflight.check(config.resolve([*DIGITS, *flags]), 1)


def test_packages_are_found():
    assert preflight._installed("json.decoder")
    assert not preflight._installed("json.none")
    assert not preflight._installed("no_such_package.module")


def test_the_program_says_so_without_tensorflow():
    code = (
        "import sys\nfrom hybrid_imagenet import main\n"
        f"code = main.main([*{DIGITS}, '--per_gpu_batch=4096', *sys.argv[1:]])\n"
        "assert 'tensorflow' not in sys.modules\nsys.exit(code)"
    )
    for more in ((), ("--check_only",)):
        done = subprocess.run([sys.executable, "-c", code, *more], capture_output=True, text=True)
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1
        assert "4096 images on 1 GPUs" in done.stderr
