"""Numbers of ranks, efficiency and failures of the scaling benchmark."""

import contextlib
import io
import json
import sys
import types
from unittest import mock

import pytest
import tensorflow as tf

from benchmarks import scaling as compared
from hybrid_imagenet import config
from hybrid_imagenet.benchmarks import scaling
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.training import build
from hybrid_imagenet.training.losses import binary_cross_entropy
from tests.support.gradients import means


def row(ranks, rate, step=0.1, compute=0.08):
    return {
        "ranks": ranks,
        "images_per_second": rate,
        "step_seconds": step,
        "compute_seconds": compute,
        "exposed_seconds": step - compute,
        "model": "resnet50",
        "image_size": 224,
        "batch_per_rank": 128,
        "precision": "mixed_float16",
        "allreduce": "ring",
        "compression": "fp16",
    }


def test_efficiency_of_published_throughputs():
    """H, Table 3.3: 36,082 images/s on 24 GPUs of 1,542 each are 97.5 %."""
    rows = [row(1, 1542.0), row(24, 36082.0)]
    scaling.add_efficiency(rows)
    assert rows[0]["efficiency"] == 1.0
    assert rows[1]["efficiency"] == pytest.approx(0.975, abs=5e-4)
    text = scaling.format_table(rows)
    assert "97.5%" in text and "20.0" in text


@pytest.mark.parametrize("text", ["", "0", "2,1", "1,1", "a"])
def test_numbers_of_ranks(text):
    with pytest.raises(UserError, match="increasing whole numbers"):
        scaling.parse_rank_counts(text)


def test_flags_of_steps_that_are_not_timed_are_refused():
    with pytest.raises(
        UserError,
        match="virtual_gpus is not 1, and a step here is one batch of each GPU: omit what",
    ):
        scaling.main(["--worker", "--", "--dataset=synthetic", "--virtual_gpus=2"])


@pytest.mark.parametrize(
    ("command", "seconds", "message"),
    [
        (
            [sys.executable, "-c", "raise SystemExit('error: no')"],
            9,
            r"2 ranks failed \(exit code 1\): error",
        ),
        (["sleep", "60"], 0.1, r"more than --timeout=0\.1 s"),
    ],
)
def test_a_job_that_fails_says_why(command, seconds, message):
    with pytest.raises(UserError, match=message):
        scaling.run_job(command, 2, seconds)


def test_a_job_that_fails_leaves_the_rows_before_it(tmp_path, capsys):
    def launched(command, ranks, timeout):
        if ranks == 4:
            raise UserError("the job of 4 ranks failed")
        return row(ranks, 100.0 * ranks), ""

    options = scaling.make_parser().parse_args(["--ranks=1,2,4", f"--json={tmp_path}/rows.json"])
    with (
        mock.patch.object(scaling, "run_job", launched),
        pytest.raises(UserError, match="4 ranks failed"),
    ):
        scaling.run_jobs(options, [])
    assert [found["ranks"] for found in json.loads((tmp_path / "rows.json").read_text())] == [1, 2]
    assert "100.0%" in capsys.readouterr().out


def test_ranks_of_other_hosts_start_by_run():
    options = scaling.make_parser().parse_args(["-H", "a:4,b:4", "--ssh_port=99"])
    words = scaling.job_command(["scaling", "--worker"], 2, options.hosts, options)
    assert words[2:] == [
        "hybrid_imagenet",
        "run",
        "-np",
        "2",
        "-H",
        "a:4,b:4",
        "--ssh_port=99",
        "--module=hybrid_imagenet.benchmarks",
        "--",
        "scaling",
        "--worker",
    ]
    alone = scaling.job_command(["{}"], 1, "", options, "peer.py")
    assert alone == [sys.executable, "peer.py", "{}"]


def test_what_a_launcher_puts_around_a_result_is_left_out():
    lines = [
        "[1,1]<stdout>:first",
        '[1,0]<stdout>:scaling-result {"ranks": 2}[1,0]<stdout>:',
        "[1,1]<stdout>:{}",
    ]
    program = f"print(*{lines}, sep=chr(10))"
    assert scaling.run_job([sys.executable, "-c", program], 2, 9)[0] == {"ranks": 2}


def test_a_peer_that_is_not_installed_is_skipped_with_a_message(tmp_path, capsys):
    (tmp_path / "tf_keras.py").write_text("raise ImportError('hidden')")
    options = compared.parser().parse_args([])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        peer = compared.peer_job(1, options, ["--image_size=32", "--per_gpu_batch=2"])
    compared.print_peers([row(1, 100.0)], [peer])
    assert "hybrid_imagenet[peers]" in capsys.readouterr().out


@pytest.mark.slow
def test_ranks_measure_themselves(pools):
    flags = [
        "--dataset=synthetic_tensors",
        "--model=resnet8",
        "--model_width=4",
        "--image_size=8",
        "--per_gpu_batch=4",
    ]
    first, second = pools[2].call(
        run_rank, ["--worker", "--steps=1", "--rounds=1", "--classes=10", "--", *flags]
    )
    found = json.loads(first.partition(scaling._MARK)[2])
    assert (found["ranks"], found["model"], found["gpu"], second) == (2, "resnet8", None, "")
    assert found["compute_seconds"] > 0 and found["step_seconds"] > 0


def run_rank(words):
    """The rank of a job, in a rank of the pool: its output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        scaling.main(words)
    return output.getvalue()


def test_the_step_that_is_timed_is_the_one_that_the_flags_ask_for():
    flags = [
        "--model=resnet8",
        "--model_width=4",
        "--stem=3x3",
        "--image_size=8",
        "--per_gpu_batch=2",
        "--jit_compile",
        "--loss=sigmoid",
        "--label_smoothing=0.1",
        "--augmentation=sony",
    ]
    alone = SingleProcess()
    with mock.patch.object(build, "TrainStep") as made:
        scaling.training_step(config.resolve(flags), alone, alone, "float32", 10).call()
    images = made.return_value.single.call_args.args[0]["image"]
    assert images.shape == (2, 11, 11, 3), "which the augmentation cuts to 8 pixels"
    given = made.call_args.kwargs
    assert (given["jit_compile"], given["label_smoothing"]) == (True, 0.1)
    assert given["loss"] is binary_cross_entropy


def test_the_step_without_exchange_sums_its_control_word_like_the_other():
    """Otherwise its cost would count as communication of gradients."""
    words = []
    ranks = types.SimpleNamespace(
        allreduce_on_host=lambda tensor, name: words.append(name) or tensor
    )
    staying = scaling._communicator_without_reduction(ranks)
    staying.allreduce_on_host(tf.constant([1]), "control")
    (gradient,) = means(staying.reduce_gradients, [tf.constant([2.0])], ["w"])
    assert words == ["control"]
    assert gradient.numpy().tolist() == [2.0]
