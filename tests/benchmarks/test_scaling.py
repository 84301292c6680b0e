"""Tests of `bench scaling`."""

import contextlib
import io
import json
import sys
from unittest import mock

import pytest

from benchmarks import scaling_peers as compared
from hybrid_imagenet import config
from hybrid_imagenet.benchmarks import scaling
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.training import build
from hybrid_imagenet.training.losses import binary_cross_entropy


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


def test_add_efficiency_of_published_throughputs_equals_the_paper():
    # Lu et al., Table 3.3: 36,082 images/s on 24 GPUs of 1,542 each are 97.5 %.
    rows = [row(1, 1542.0), row(24, 36082.0)]
    scaling.add_efficiency(rows)
    assert rows[0]["efficiency"] == 1.0
    assert rows[1]["efficiency"] == pytest.approx(0.975, abs=5e-4)
    text = scaling.format_table(rows)
    assert "97.5%" in text and "20.0" in text


@pytest.mark.parametrize("text", ["", "0", "2,1", "1,1", "a"])
def test_parse_rank_counts_of_invalid_text_raises(text):
    with pytest.raises(UserError, match="increasing whole numbers"):
        scaling.parse_rank_counts(text)


def test_worker_with_flags_of_another_step_raises():
    with pytest.raises(
        UserError,
        match="virtual_gpus is 2, but a step of this benchmark is one batch of each GPU",
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
def test_run_job_that_fails_raises_the_reason(command, seconds, message):
    with pytest.raises(UserError, match=message):
        scaling.run_job(command, 2, seconds)


def test_run_jobs_after_a_failure_keeps_earlier_rows(tmp_path, capsys):
    def run_job(command, ranks, timeout):
        if ranks == 4:
            raise UserError("the job of 4 ranks failed")
        return row(ranks, 100.0 * ranks)

    options = scaling.make_parser().parse_args(["--ranks=1,2,4", f"--json={tmp_path}/rows.json"])
    with (
        mock.patch.object(scaling, "run_job", run_job),
        pytest.raises(UserError, match="4 ranks failed"),
    ):
        scaling.run_jobs(options, [])
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["ranks"] for row in rows] == [1, 2]
    assert "100.0%" in capsys.readouterr().out


def test_job_command_on_other_hosts_uses_run():
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


def test_run_job_ignores_what_a_launcher_prints_around_the_result():
    lines = [
        "[1,1]<stdout>:first",
        '[1,0]<stdout>:scaling-result {"ranks": 2}[1,0]<stdout>:',
        "[1,1]<stdout>:{}",
    ]
    program = f"print(*{lines}, sep=chr(10))"
    assert scaling.run_job([sys.executable, "-c", program], 2, 9) == {"ranks": 2}


def test_bench_scaling_without_a_peer_skips_it_with_a_message(tmp_path, capsys):
    (tmp_path / "tf_keras.py").write_text("raise ImportError('hidden')")
    options = compared.parser().parse_args([])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        peer = compared.peer_job(1, options, ["--image_size=32", "--per_gpu_batch=2"])
    compared.print_peers([row(1, 100.0)], [peer])
    assert ".[peers]" in capsys.readouterr().out


@pytest.mark.slow
def test_bench_scaling_on_two_ranks_measures_steps_and_communication(pools):
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
    result = json.loads(first.partition(scaling._RESULT_PREFIX)[2])
    assert (result["ranks"], result["model"], result["gpu"], second) == (2, "resnet8", None, "")
    assert result["compute_seconds"] > 0 and result["step_seconds"] > 0


def run_rank(words):
    """Runs a rank of `bench scaling` on a rank of the pool; returns its output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        scaling.main(words)
    return output.getvalue()


def test_training_step_applies_the_flags():
    flags = [
        "--model=resnet8",
        "--model_width=4",
        "--stem=3x3",
        "--image_size=8",
        "--per_gpu_batch=2",
        "--jit_compile",
        "--loss=sigmoid",
        "--label_smoothing=0.1",
        "--augmentation=flash",
    ]
    alone = SingleProcess()
    with mock.patch.object(build, "TrainStep") as train_step:
        scaling.training_step(config.resolve(flags), alone, alone, "float32", 10).call()
    images = train_step.return_value.update.call_args.args[0]["image"]
    # The augmentation crops them to 8 pixels.
    assert images.shape == (2, 11, 11, 3)
    arguments = train_step.call_args.kwargs
    assert (arguments["jit_compile"], arguments["label_smoothing"]) == (True, 0.1)
    assert arguments["loss"] is binary_cross_entropy


@pytest.mark.parametrize(("ranks", "first"), [("1", "--lr=1"), ("1,2", "--nojit_compile")])
def test_scaling_times_the_same_step_on_every_number_of_ranks(ranks, first, monkeypatch):
    commands = []

    def run_job(words, *_):
        commands.append(words)
        return {"images_per_second": 1.0, "ranks": 1}

    monkeypatch.setattr(scaling, "run_job", run_job)
    monkeypatch.setattr(scaling, "format_table", lambda rows: "")
    assert scaling.main([f"--ranks={ranks}", "--", "--lr=1"]) == 0
    for words in commands:
        flags = words[len(words) - 1 - words[::-1].index("--") + 1 :]
        assert flags[0] == first
        assert flags[-1] == "--lr=1"
