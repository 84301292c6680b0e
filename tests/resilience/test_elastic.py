"""Ranks that come and go: what is refused, what is committed, and a job that goes 4 -> 3 -> 4."""

import collections
import json
import os
import re
import signal
import types

import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.comm import Settings, elastic
from hybrid_imagenet.config import AUTO, checks, from_values
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.resilience.elastic_state import Memory
from hybrid_imagenet.training.callbacks.elastic_commits import CommitCallback
from tests.data.support import jpeg, write_shards
from tests.resilience.elastic_job import Job

EXAMPLES, BATCH, EPOCHS = 1003, 4, 1


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (Settings(allreduce="torus"), "--allreduce=torus"),
        (Settings(cycle_time_ms=2.0), "--cycle_time_ms=2"),
        (Settings(fusion_threshold_mb=65.0), "--fusion_threshold_mb=65"),
    ],
)
def test_settings_that_need_fixed_ranks_are_refused(settings, named):
    with pytest.raises(UserError, match=named):
        elastic.prepare(settings)


@pytest.mark.parametrize("name", ["HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD"])
def test_what_horovod_cannot_be_told_twice_is_refused(monkeypatch, name):
    monkeypatch.setenv(name, "5")
    with pytest.raises(UserError, match=f"{name} is set"):
        elastic.prepare(Settings())


def test_the_automatic_batch_is_refused():
    with pytest.raises(UserError, match="--per_gpu_batch=auto"):
        checks.check_elastic(from_values({"per_gpu_batch": AUTO}))
    checks.check_elastic(from_values({"per_gpu_batch": 8}))


def test_new_ranks_have_time_to_start(monkeypatch):
    monkeypatch.delenv("HOROVOD_GLOO_TIMEOUT_SECONDS", raising=False)
    elastic.prepare(Settings())
    assert int(os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"]) > 60
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "7")
    elastic.prepare(Settings())
    assert os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "7"


class Parts:
    """A state with one variable, and a callback that commits it every 3 steps."""

    def __init__(self):
        self.memory, self.state, self.merged = Memory(), RunState(), []
        self.variable = tf.Variable([0.0, 1.0])
        self.callback = CommitCallback(
            self.memory,
            state=self.state,
            variables=lambda: {"model/weight": self.variable},
            description=lambda: {"model": "resnet18"},
            synchronize=lambda: self.merged.append(self.state.step),
            every_steps=3,
            world_size=4,
        )

    def step(self, **logs):
        self.state.step += 1
        self.variable.assign_add([1.0, 1.0])
        self.callback.on_train_batch_end(self.state.step, logs)


def test_commits_hold_what_the_last_due_step_left():
    parts = Parts()
    assert parts.memory.recall() is None
    parts.callback.on_train_begin()
    for _ in range(5):
        parts.step()
    assert parts.merged == [0, 3]
    found = parts.memory.recall()
    assert found.meta["state"]["step"] == 3
    assert found.meta["model"] == "resnet18"
    np.testing.assert_array_equal(found.arrays["model/weight"], [3.0, 4.0])
    assert (parts.memory.world_size, parts.memory.last_step) == (4, 5)
    parts.callback.on_epoch_end(0)
    assert parts.memory.recall().meta["state"]["step"] == 5


def test_the_clock_of_the_run_goes_on_while_ranks_connect(monkeypatch):
    parts = Parts()
    parts.state.seconds = 100.0
    now = [50.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("hybrid_imagenet.resilience.elastic_state.time", clock)
    parts.callback.on_train_begin()
    now[0] = 57.0
    assert parts.memory.recall().meta["state"]["seconds"] == 107.0
    assert parts.memory.checkpoint.meta["state"]["seconds"] == 100.0


def test_ranks_that_agree_to_connect_anew_lose_no_step():
    parts = Parts()
    parts.step()
    with pytest.raises(elastic.RanksChangeError):
        parts.step(regroup=True)
    assert parts.memory.recall().meta["state"]["step"] == 2


def seen(job, hosts):
    """How often each example was trained on by the steps that count: those that were not done anew."""
    changes = [(record["step"], record["world_size"]) for record in job.records("ranks")]
    counts, steps = collections.Counter(), collections.Counter()
    for path in job.notes.iterdir():
        for line in path.read_text().splitlines():
            step, size, labels = json.loads(line)
            if size == ([hosts] + [after for at, after in changes if at <= step])[-1]:
                counts.update(labels)
                steps[step] += 1
    return counts, steps


def flags(folder):
    return (
        "--dataset=tfrecord",
        f"--num_classes={EXAMPLES}",
        f"--data_dir={folder}",
        *("--model=resnet8", "--width=8", "--stem=3x3", "--image_size=16"),
        "--augmentation=digits",
        "--precision=float32",
        f"--per_gpu_batch={BATCH}",
        f"--epochs={EPOCHS}",
        "--optimizer=sgd",
        "--log_every_steps=2",
        "--commit_every_steps=5",
        "--progress=plain",
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_shards(folder, "train", [(jpeg(number, 36, 36), number) for number in range(EXAMPLES)])
    write_shards(folder, "validation", [(jpeg(number, 36, 36), number) for number in range(8)])
    return folder


@pytest.mark.parametrize("hosts", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_killed_rank_and_an_added_host_change_nothing_but_the_speed(data, tmp_path, hosts):
    job = Job(tmp_path, hosts, 2, *flags(data))
    try:
        job.wait_for_step(8)
        job.kill(job.hosts[-2])
        job.wait_for(lambda job: job.records("ranks"))
        (lost,) = job.records("ranks")
        assert (lost["world_size_before"], lost["world_size"]) == (hosts, hosts - 1)
        assert 0 <= lost["steps_repeated"] <= 5 + 3  # --commit_every_steps, and steps that were under way
        job.wait_for_step(lost["step"] + 8, hosts - 1)
        job.hosts.append("127.0x1")
        job.tell()
        job.wait_for(lambda job: len(job.records("ranks")) == 2)
        grown = job.records("ranks")[1]
        assert (grown["world_size_before"], grown["world_size"], grown["steps_repeated"]) == (hosts - 1, hosts, 0)
        assert job.finish() == 0, job.output()
    finally:
        job.close()
    counts, steps = seen(job, hosts)
    sizes = {step: hosts - (lost["step"] <= step < grown["step"]) for step in steps}
    assert steps == sizes  # every rank of the time has noted each step once
    assert sorted(steps) == list(range(len(steps)))
    assert min(counts[number] for number in range(EXAMPLES)) == EPOCHS
    assert sum(counts.values()) - EPOCHS * EXAMPLES < hosts * BATCH  # the last batch is filled up from the next epoch
    (epoch,) = job.records("epoch")
    assert (epoch["epoch"], epoch["val_count"]) == (1, 8)
    summary = json.loads((job.run_dir / "summary.json").read_text())
    assert (summary["world_size"], summary["steps"]) == (hosts, len(steps))


@pytest.mark.slow
def test_a_stopped_rank_is_left_behind(data, tmp_path):
    job = Job(tmp_path, 3, 2, *flags(data), "--stall_seconds=20", most=3)
    try:
        job.wait_for_step(8)
        os.kill(job.rank_process(job.hosts[1]), signal.SIGSTOP)
        job.wait_for(lambda job: job.records("ranks"))
        assert job.records("ranks")[0]["world_size"] == 2
        assert job.finish() == 0, job.output()
    finally:
        job.close()
    assert re.search(r"stall: rank \d on \S+ \(process \d+\) is silent", job.output())
    assert "gave no sign of life for 20 s: it was killed" in job.output()


@pytest.mark.slow
def test_ranks_whose_host_is_taken_away_leave(data, tmp_path):
    job = Job(tmp_path, 3, 2, *flags(data), most=3)
    try:
        job.wait_for_step(8)
        job.hosts.remove("127.0.0.1")
        job.tell()
        job.wait_for(lambda job: job.records("ranks"))
        (change,) = job.records("ranks")
        assert (change["world_size"], change["steps_repeated"]) == (2, 0)
        assert job.finish() == 0, job.output()
    finally:
        job.close()


@pytest.mark.slow
def test_the_first_rank_may_be_the_one_that_is_lost(data, tmp_path):
    job = Job(tmp_path, 3, 2, *flags(data), most=3)
    try:
        job.wait_for_step(8)
        job.kill(job.hosts[0])
        job.wait_for(lambda job: job.records("ranks"))
        assert job.finish() == 0, job.output()
    finally:
        job.close()
    assert [record["epoch"] for record in job.records("epoch")] == [1]
