"""Tests of `hybrid_imagenet.runlog.trackers`, with stubs of the three packages."""

import json
import sys
import threading
import types

import keras
import numpy as np
import pytest

import hybrid_imagenet as hi
from hybrid_imagenet import config as run_config
from hybrid_imagenet import run_plan
from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.runlog import trackers
from hybrid_imagenet.training import preflight
from hybrid_imagenet.training.recorder import Recording
from tests.training.test_recorder import FACTS

STEP = {
    "kind": "step",
    "step": 20,
    "epoch": 1,
    "train_loss": np.float32(0.5),
    "upper_bound": None,
    "val_split": "validation",
    "trust_ratios": {"stem_conv": 0.25, "logits": None},
}
STEP_VALUES = {"epoch": 1.0, "train_loss": 0.5, "trust_ratios/stem_conv": 0.25}
EPOCH = {"kind": "epoch", "step": 20, "epoch": 1, "train_loss": 0.4, "val_top1": 0.9}
EPOCH_VALUES = {"epoch": 1.0, "epoch/train_loss": 0.4, "val_top1": 0.9}
CONFIG = {"flags": {"lr": 0.5, "data_dir": None}, "version": "1"}


class Server:
    """Records what the stub packages receive, by the identifier of a run."""

    def __init__(self):
        self.runs = {}
        self.fails = False

    def run(self, run_id, name, project, config):
        run = self.runs.setdefault(
            run_id, {"name": name, "project": project, "values": [], "ends": [], "sessions": 0}
        )
        run["config"] = config
        run["sessions"] += 1
        return run

    def log(self, run_id, values, step):
        if self.fails:
            raise OSError("no route to host")
        self.runs[run_id]["values"].append((step, values))


class WandbRun:
    dir = "offline-run"

    def __init__(self, server, run_id):
        self.server = server
        self.run_id = run_id
        self.axes = {}
        self.preempting = False

    def define_metric(self, name, step_metric=None, hidden=False):
        self.axes[name] = step_metric

    def log(self, values):
        assert self.axes["*"] == "step"
        self.server.log(
            self.run_id, {k: v for k, v in values.items() if k != "step"}, values["step"]
        )

    def mark_preempting(self):
        self.preempting = True

    def finish(self, exit_code):
        self.server.runs[self.run_id]["ends"].append((exit_code, self.preempting))


def wandb_stub(server):
    def init(*, project, name, id, resume, dir, config, mode):  # noqa: A002 - the package's name
        assert resume == "allow"
        assert mode == "offline"
        server.run(id, name, project, config)
        return WandbRun(server, id)

    settings = types.SimpleNamespace(api_key=None)
    return types.SimpleNamespace(init=init, setup=lambda: types.SimpleNamespace(settings=settings))


class MlflowClient:
    def __init__(self, server):
        self.server = server

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        return name

    def create_run(self, experiment, run_name):
        run_id = f"id{len(self.server.runs)}"
        self.server.run(run_id, run_name, experiment, {})
        return self.get_run(run_id)

    def get_run(self, run_id):
        params = self.server.runs[run_id]["config"]
        return types.SimpleNamespace(
            info=types.SimpleNamespace(run_id=run_id), data=types.SimpleNamespace(params=params)
        )

    def update_run(self, run_id, status):
        assert status == "RUNNING"
        self.server.runs[run_id]["sessions"] += 1

    def log_batch(self, run_id, metrics=(), params=()):
        config = self.server.runs[run_id]["config"]
        for key, value in params:
            assert key not in config, "MLflow rejects another value"
            config[key] = value
        if metrics:
            (step,) = {step for *_, step in metrics}
            self.server.log(run_id, {key: value for key, value, *_ in metrics}, step)

    def set_terminated(self, run_id, status):
        self.server.runs[run_id]["ends"].append(status)


def mlflow_stub(server):
    def metric(key, value, timestamp, step):
        assert timestamp > 1.6e12, "milliseconds"
        return (key, value, timestamp, step)

    return types.SimpleNamespace(
        MlflowClient=lambda: MlflowClient(server),
        get_tracking_uri=lambda: "sqlite:///mlflow.db",
        entities=types.SimpleNamespace(Metric=metric, Param=lambda key, value: (key, value)),
    )


class TrackioRun:
    def __init__(self, server, run_id):
        self.server = server
        self.run_id = run_id

    def log(self, values, step):
        self.server.log(self.run_id, values, step)

    def finish(self):
        self.server.runs[self.run_id]["ends"].append("end")


def trackio_stub(server):
    def init(*, project, name, config, resume, embed):
        assert resume == "allow"
        server.run(name, name, project, config)
        return TrackioRun(server, name)

    return types.SimpleNamespace(init=init)


STUBS = {"wandb": wandb_stub, "mlflow": mlflow_stub, "trackio": trackio_stub}
ENDS = {
    "wandb": [(75, True), (0, False)],
    "mlflow": ["KILLED", "FINISHED"],
    "trackio": ["end", "end"],
}


@pytest.fixture
def server(monkeypatch):
    """Installs the stubs of all packages."""
    server = Server()
    for name, stub in STUBS.items():
        monkeypatch.setitem(sys.modules, name, stub(server))
    for variable in ("WANDB_MODE", "WANDB_PROJECT", "MLFLOW_EXPERIMENT_ID", "TRACKIO_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    return server


def start(tracker, directory, messages, **arguments):
    return trackers.TrackerLog(
        tracker,
        name="first",
        config=CONFIG,
        print_message=messages.append,
        directory=directory,
        **arguments,
    )


@pytest.mark.parametrize("tracker", trackers.NAMES)
def test_tracker_in_a_second_session_continues_the_run(tracker, server, tmp_path):
    messages = []
    log = start(tracker, tmp_path / "run", messages)
    log.log(STEP)
    log.close(trackers.STOPPED)
    log = start(tracker, tmp_path / "run", messages)
    log.log(EPOCH)
    log.close(trackers.FINISHED)
    ((run_id, run),) = server.runs.items()
    assert json.loads((tmp_path / "run" / "tracker.json").read_text()) == {tracker: run_id}
    assert run["values"] == [(20, STEP_VALUES), (20, EPOCH_VALUES)]
    assert run["ends"] == ENDS[tracker]
    assert run["sessions"] == 2
    assert run["name"].startswith("first")
    assert run["project"] == "hybrid-imagenet"
    expected = CONFIG
    if tracker == "mlflow":
        expected = {"flags.lr": "0.5", "flags.data_dir": "None", "version": "1"}
    assert run["config"] == expected


@pytest.mark.parametrize("tracker", trackers.NAMES)
def test_tracker_uses_the_project_that_is_passed(tracker, server, tmp_path):
    start(tracker, None, [], project="flowers").close(trackers.FAILED)
    assert [run["project"] for run in server.runs.values()] == ["flowers"]


def test_tracker_with_a_failing_server_prints_one_message_and_the_count(server, tmp_path):
    messages = []
    log = start("trackio", None, messages)
    server.fails = True
    log.log(STEP)
    log.log(STEP)
    log.close(trackers.FINISHED)
    assert messages == [
        "a record could not be sent to trackio: no route to host. The run continues, and"
        " metrics.jsonl has the same values.",
        "trackio lacks 2 records. metrics.jsonl has them.",
    ]


def test_close_does_not_wait_forever_for_a_server(server, monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(TrackioRun, "log", lambda *_, **__: answer.wait(30))
    monkeypatch.setattr(trackers, "_CLOSE_SECONDS", 0.05)
    messages = []
    log = start("trackio", None, messages)
    log.log(STEP)
    log.close(trackers.FINISHED)
    answer.set()
    (message,) = messages
    assert message.startswith("trackio did not answer for 0.05 s")


def test_tracker_that_cannot_start_a_run_raises_one_error_with_a_remedy(server, monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("unsupported\nURI")

    monkeypatch.setattr(MlflowClient, "create_run", fail)
    with pytest.raises(UserError, match=r"^--tracker=mlflow .*: unsupported URI\. Set MLFLOW_TR"):
        start("mlflow", None, [])


def test_tracker_with_a_damaged_file_of_identifiers_raises(server, tmp_path):
    (tmp_path / trackers.ID_FILE).write_text("[")
    with pytest.raises(UserError, match=r"tracker\.json cannot be read\. Remove it"):
        start("trackio", tmp_path, [])


@pytest.mark.parametrize("tracker", trackers.NAMES)
def test_tracker_without_its_package_raises_before_the_run_starts(tracker, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, tracker, None)
    expected = rf"^The tracker {tracker} needs .* not installed\. Run pip install {tracker}\.$"
    flags = ["--dataset=digits", f"--run_dir={tmp_path / 'run'}", f"--tracker={tracker}"]
    with pytest.raises(UserError, match=expected):
        preflight.check(run_config.resolve(flags))
    with pytest.raises(UserError, match=expected):
        hi.callbacks.Tracker(tracker)


def test_tracker_of_the_program_gets_records_and_configuration(server, tmp_path):
    def session(*flags, stop):
        common = [f"--run_dir={tmp_path / 'run'}", "--tracker=wandb", "--tracker_project=own"]
        recording = Recording(run_plan.make(run_config.resolve([*common, *flags])), 0, 1)
        recording.start(FACTS, {"world_size": 1, "images_per_epoch": 100}, RunState())
        recording.step(20, 0.5, {"step": 20, "epoch": 1, "position": 0.5, "train_loss": 0.5})
        recording.epoch({"step": 20, "epoch": 1, "val_top1": 0.9, "position": 1.0})
        recording.finish(RunState(stop=stop))
        recording.stop_logging()

    session("--epochs=9", stop="preempted")
    session("--resume", stop="")
    ((_, run),) = server.runs.items()
    step_values = {"epoch": 1.0, "position": 0.5, "train_loss": 0.5}
    records = [(20, step_values), (20, {"epoch": 1.0, "epoch/position": 1.0, "val_top1": 0.9})]
    assert run["values"] == 2 * records
    assert run["ends"] == ENDS["wandb"]
    assert (run["name"], run["project"]) == ("run", "own")
    assert run["config"] == json.loads((tmp_path / "run" / "config.json").read_text())
    assert run["config"]["flags"]["epochs"] == 9


def test_tracker_on_ranks_other_than_0_starts_no_run(server, tmp_path):
    flags = [f"--run_dir={tmp_path / 'run'}", "--tracker=wandb"]
    recording = Recording(run_plan.make(run_config.resolve(flags)), 1, 2)
    recording.start(FACTS, {}, RunState())
    recording.finish(RunState())
    recording.stop_logging()
    assert server.runs == {}


def test_tracker_records_a_diverged_run_as_failed(server, tmp_path):
    flags = [f"--run_dir={tmp_path / 'run'}", "--tracker=mlflow"]
    recording = Recording(run_plan.make(run_config.resolve(flags)), 0, 1)
    recording.start(FACTS, {"world_size": 1, "images_per_epoch": 100}, RunState())
    recording.divergence(7, 1.0, 300.0)
    recording.interrupt()
    ((_, run),) = server.runs.items()
    assert run["values"] == [(7, {"seconds": 1.0, "train_loss": 300.0})]
    assert run["ends"] == ["FAILED"]


def test_tracker_of_fit_sends_epochs_and_continues_the_run(server, tmp_path):
    for epoch in (0, 1):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="small")
        model.compile("sgd", "mse")
        tracker = hi.callbacks.Tracker("trackio", config={"batch": 2}, directory=tmp_path / "run")
        model.fit(
            np.ones((4, 2)),
            np.ones((4, 1)),
            batch_size=2,
            verbose=0,
            initial_epoch=epoch,
            epochs=epoch + 1,
            callbacks=hi.callbacks.default_callbacks(tracker),
        )
    ((_, run),) = server.runs.items()
    assert run["name"].startswith("small-")
    assert run["config"]["batch"] == 2
    assert run["config"]["optimizer"]["class"] == "SGD"
    assert [step for step, _ in run["values"]] == [2, 2]
    assert [values["epoch"] for _, values in run["values"]] == [1, 2]
    assert all({"loss", "epoch"} == set(values) for _, values in run["values"])


def test_tracker_with_an_unknown_name_suggests_one():
    with pytest.raises(UserError, match=r"did you mean wandb\?"):
        hi.callbacks.Tracker("wanbd")
