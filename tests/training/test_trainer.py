"""The training loop: the order of its events, and the state and logs at each of them."""

import json
import math

import keras
import pytest
import tensorflow as tf

from hybrid_imagenet import config, files, startup, train
from hybrid_imagenet.callbacks.divergence_guard import DivergedError
from hybrid_imagenet.cluster import gpus
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.commands.report import load
from hybrid_imagenet.config import Origin
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.training import trainer as trainer_module
from tests.support import in_process, program

# The dataset has 1,500 images, so an epoch has three updates, the last of which wraps around.
FLAGS = (
    "--dataset=digits",
    "--augmentation=none",
    "--model=tests.training.own_networks:with_logits",
    "--image_size=8",
    "--optimizer=sgd",
    "--precision=float32",
    "--per_gpu_batch=500",
    "--warmup_epochs=0",
    "--progress=none",
    "--stall_timeout=0",
)


class EventLog(keras.callbacks.Callback):
    """Records all events with the position of the run, and the logs of steps and epochs."""

    def __init__(self, trainer):
        super().__init__()
        self.trainer = trainer
        self.events = []
        self.step_logs = []
        self.epoch_logs = []

    def add(self, name, number=None):
        self.events.append((name, number, self.trainer.state.step))

    def on_train_begin(self, logs=None):
        self.add("train begin")

    def on_epoch_begin(self, epoch, logs=None):
        self.add("epoch begin", epoch)

    def on_train_batch_begin(self, batch, logs=None):
        self.add("batch begin", batch)

    def on_train_batch_end(self, batch, logs=None):
        self.add("batch end", batch)
        self.step_logs.append(logs)

    def on_test_begin(self, logs=None):
        self.add("test begin")

    def on_test_end(self, logs=None):
        self.add("test end")

    def on_epoch_end(self, epoch, logs=None):
        self.add("epoch end", epoch)
        self.epoch_logs.append(dict(logs))
        self.sums = self.trainer.step.sums.read()

    def on_train_end(self, logs=None):
        self.add("train end")


def run(tmp_path, *flags, change=lambda trainer: None):
    """Trains in this process; returns the event log and the reason why the run ended."""
    logs = []

    def callbacks(trainer):
        change(trainer)
        logs.append(EventLog(trainer))
        return logs

    arguments = [*FLAGS, f"--run_dir={tmp_path / 'run'}", *flags]
    with in_process.alone():
        stop = train.run(config.resolve(arguments), SingleProcess(), callbacks)
    return logs[0], stop


def failing_step(trainer):
    def fails(*arguments):
        raise tf.errors.InternalError(None, None, "libdevice not found\nnode: StatefulPartitioned")

    trainer.step.update = fails


def test_train_names_the_remedy_if_the_first_step_that_xla_compiles_fails(tmp_path):
    with pytest.raises(UserError, match=r"XLA compiles, .* libdevice not found\. Add --nojit_comp"):
        run(tmp_path / "xla", "--jit_compile", change=failing_step)
    with pytest.raises(tf.errors.InternalError):
        run(tmp_path / "plain", change=failing_step)


def test_train_with_a_kept_default_of_xla_on_a_cpu_does_not_name_xla(tmp_path):
    flags = [*FLAGS, f"--run_dir={tmp_path / 'run'}"]
    kept = config.resolve(flags).replace(Origin.RUN, jit_compile=True)

    def callbacks(trainer):
        failing_step(trainer)
        return []

    with in_process.alone(), pytest.raises(tf.errors.InternalError):
        train.run(kept, SingleProcess(), callbacks)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_train_turns_off_slow_graph_passes_only_on_cpus(tmp_path, monkeypatch, has_gpu):
    monkeypatch.setattr(train, "has_gpu", lambda: has_gpu)
    found = {}

    def read_options(trainer):
        found.update(tf.config.optimizer.get_experimental_options())

    run(tmp_path, "--max_steps=1", change=read_options)
    assert found.get("constant_folding", True) is has_gpu
    assert found.get("remapping", True)


def test_train_on_a_gpu_stores_what_xla_compiles(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "in_use", lambda: True)
    monkeypatch.setattr(gpus, "compute_capability", lambda: (8, 0))
    run(tmp_path, "--max_steps=1")
    content = json.loads((tmp_path / "run" / "config.json").read_text())
    for name, value in (("jit_compile", False), ("jit_stem", False)):
        assert content["flags"][name] == value
        assert content["origins"][name] == Origin.HARDWARE.value


def test_train_calls_every_event_in_order_with_a_validation_inside_an_epoch(tmp_path):
    log, stop = run(tmp_path, "--max_steps=3", "--eval_every_epochs=0.6", "--log_every_steps=2")
    assert log.events == [
        ("train begin", None, 0),
        ("epoch begin", 0, 0),
        ("batch begin", 0, 0),
        ("batch end", 0, 1),
        ("batch begin", 1, 1),
        ("batch end", 1, 2),
        ("test begin", None, 2),
        ("test end", None, 2),
        ("epoch end", 0, 2),
        ("epoch begin", 0, 2),
        ("batch begin", 0, 2),
        ("batch end", 0, 3),
        ("test begin", None, 3),
        ("test end", None, 3),
        ("epoch end", 0, 3),
        ("train end", None, 3),
    ]
    assert stop == ""
    assert [logs and logs["step"] for logs in log.step_logs] == [None, 2, None]
    assert [logs["epoch"] for logs in log.epoch_logs] == [pytest.approx(2 / 3), 1]
    # A checkpoint at the end of an epoch begins the next one, so the sums are zero before it.
    assert log.sums.count == 0


def test_train_with_accumulation_calls_batch_events_once_per_update(tmp_path):
    log, _ = run(
        tmp_path,
        "--max_steps=2",
        "--per_gpu_batch=100",
        "--gradient_accumulation_steps=5",
        "--eval_every_epochs=9",
        "--log_every_steps=1",
    )
    assert [event for event in log.events if event[0] == "batch end"] == [
        ("batch end", 0, 1),
        ("batch end", 1, 2),
    ]
    assert [logs["global_batch"] for logs in log.step_logs] == [500, 500]


def test_logs_with_a_delay_of_two_steps_come_from_the_same_epoch(tmp_path):
    """Reads values late, as on a GPU; a copy from the epoch before is not used."""

    def delay(trainer):
        trainer.step.telemetry._delay_steps = 2

    immediate, _ = run(tmp_path / "now", "--max_steps=4", "--log_every_steps=1")
    delayed, _ = run(tmp_path / "late", "--max_steps=4", "--log_every_steps=3", change=delay)
    (record,) = [logs for logs in delayed.step_logs if logs]
    assert record["step"] == 3
    assert record["train_loss"] == pytest.approx(immediate.step_logs[0]["train_loss"], rel=1e-6)
    assert record["grad_norm"] == pytest.approx(immediate.step_logs[0]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("A record is bad. Replace it."), "A record is bad"),
        # The record of the divergence cannot be written either.
        (DivergedError("The loss is infinite.", 1, math.inf), "The disk is full"),
    ],
)
def test_run_that_fails_closes_its_records_and_releases_the_directory(tmp_path, error, message):
    trainers = []

    class FailingCallback(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise error

    def fail(*arguments):
        raise UserError("The disk is full.")

    def callbacks(trainer):
        trainers.append(trainer)
        trainer.components.recording.divergence = fail
        return [FailingCallback()]

    arguments = [*FLAGS, f"--run_dir={tmp_path / 'run'}"]
    with in_process.alone(), pytest.raises(UserError, match=message):
        train.run(config.resolve(arguments), SingleProcess(), callbacks)
    (trainer,) = trainers
    with pytest.raises(ValueError, match="closed"):
        trainer.components.recording.writer.write({"kind": "step"})
    # The directory can be used again by a process other than the one that failed.
    files.lock(tmp_path / "run").close()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UserError("A record is bad. Replace it."), "A record is bad. Replace it."),
        (ValueError("wrong\nshape"), r"ValueError: wrong\nshape"),
        (
            tf.errors.ResourceExhaustedError(None, None, "OOM when allocating a tensor"),
            "The memory of the host is too small for this training. The batch has 500 images",
        ),
    ],
)
def test_run_that_fails_records_the_error_until_it_is_resumed(tmp_path, error, reason):
    recordings = []

    class FailingCallback(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise error

    def callbacks(trainer):
        recordings.append(trainer.components.recording)
        return [FailingCallback()]

    arguments = [*FLAGS, f"--run_dir={tmp_path / 'run'}", "--max_steps=2"]
    with in_process.alone(), pytest.raises(type(error)):
        train.run(config.resolve(arguments), SingleProcess(), callbacks)
    # Unexpected errors end the process, which would close the records.
    recordings[0].interrupt()
    failed = load.load_run(tmp_path / "run")
    assert failed.state == "failed"
    assert failed.error.startswith(reason)
    assert failed.summary["steps"] == 1
    run(tmp_path, "--max_steps=2", "--resume")
    finished = load.load_run(tmp_path / "run")
    assert (finished.state, finished.error) == ("finished", "")
    kinds = [record["kind"] for record in program.records(tmp_path / "run")]
    assert "failed" not in kinds


def test_run_that_loses_another_rank_does_not_record_an_error(tmp_path):
    class FailingCallback(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise tf.errors.UnavailableError(None, None, "Collective ops is aborted by: rank 1")

    arguments = [*FLAGS, f"--run_dir={tmp_path / 'run'}"]
    with in_process.alone(), pytest.raises(tf.errors.UnavailableError):
        train.run(config.resolve(arguments), SingleProcess(), lambda _: [FailingCallback()])
    assert program.records(tmp_path / "run") == []


def ask_to_stop(trainer, step):
    """Makes the ranks agree to stop after a step."""

    def follow():
        trainer.requests.stop = trainer.state.step == step

    trainer.requests.follow = follow


def test_stop_request_of_any_rank_ends_the_run_after_the_step_and_saves(tmp_path):
    def ask_in_step_2(trainer):
        ask_to_stop(trainer, 2)

    log, stop = run(tmp_path, "--max_steps=9", change=ask_in_step_2)
    assert stop == "preempted"
    assert log.events[-2:] == [("batch end", 1, 2), ("train end", None, 2)]
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000002.npz"]


class EpochCounter(keras.callbacks.Callback):
    """Counts epochs over all sessions of a run. Like Keras's, it resets itself at the start."""

    def on_train_begin(self, logs=None):
        self.epochs = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs += 1

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


def test_resumed_run_restores_the_state_dict_of_its_callbacks(tmp_path):
    counters = []

    def callbacks(trainer):
        counters.append(EpochCounter())
        return counters[-1:]

    for epochs, resume in ((1, []), (3, ["--resume"])):
        arguments = [*FLAGS, f"--run_dir={tmp_path / 'run'}", f"--epochs={epochs}", *resume]
        with in_process.alone():
            train.run(config.resolve(arguments), SingleProcess(), callbacks)
    assert [counter.epochs for counter in counters] == [1, 3]


def test_resume_after_the_last_step_of_an_epoch_begins_with_its_validation(tmp_path, monkeypatch):
    def ask_in_step_3(trainer):
        ask_to_stop(trainer, 3)

    assert run(tmp_path, "--epochs=2", change=ask_in_step_3)[1] == "preempted"
    progress = startup.StartupProgress()
    monkeypatch.setattr(trainer_module, "STARTUP_PROGRESS", progress)
    starts_at_validation = []

    def change(trainer):
        trainer.components.validation.run = record_start(trainer.components.validation.run)

    def record_start(validate):
        def validate_and_record(*arguments):
            starts_at_validation.append(not progress.finished.is_set())
            return validate(*arguments)

        return validate_and_record

    log, stop = run(tmp_path, "--epochs=2", "--resume", change=change)
    # The watchdog limits a start, and not the validation with which this run begins.
    assert starts_at_validation == [False, False]
    assert stop == ""
    assert [number for name, number, _ in log.events if name == "epoch begin"] == [0, 1]
    assert [step for name, _, step in log.events if name == "batch end"] == [4, 5, 6]
    assert [logs["epoch"] for logs in log.epoch_logs] == [1.0, 2.0]
    assert [logs["train_count"] for logs in log.epoch_logs] == [1500, 1500]
