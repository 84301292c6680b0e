"""Every example of an epoch is used or dropped once over all ranks, even after a restart."""

import concurrent.futures
import json
import threading
import types

import pytest

from hybrid_imagenet import config, run_plan
from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.data.datasets import DatasetRequest
from hybrid_imagenet.data.pipeline import HostOptions
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order.sampling import Cursor, SampleOrder
from hybrid_imagenet.training.example_count import ExampleCount
from hybrid_imagenet.training.inputs import TrainingData, replaced_on_all_ranks
from tests.data import support
from tests.data.support import MemorySource
from tests.support.fake_run import FakeRun, attach

# Number of examples.
N = 60
START = Cursor()
FLAGS = [
    "--dataset=synthetic",
    "--epochs=3",
    "--per_gpu_batch=4",
    "--image_size=8",
    "--warmup_epochs=1",
]


class Ranks:
    """The training data of several ranks in one process, which advance together."""

    def __init__(self, source, size, start=START, stored=None, *, limit=9):
        self.order = SampleOrder(N, seed=1)
        options = HostOptions(bad_records="skip", max_bad_records=limit, readers=1, prefetch=1)
        plan = run_plan.make(config.resolve(FLAGS, size))
        ranks = [types.SimpleNamespace(rank=rank, size=size) for rank in range(size)]
        self.data = [TrainingData(plan, source, self.order, rank, options) for rank in ranks]
        self.cursor = start
        self.batch = 4 * size
        for data in self.data:
            data.restore_replaced_examples(stored or [])
        self.streams = [data.stream(start) for data in self.data]

    def train(self, steps):
        """Takes steps and returns the labels that all ranks saw."""
        labels = []
        for _ in range(steps):
            for stream in self.streams:
                labels += next(stream)["label"].numpy().tolist()
            self.cursor = self.order.advance(self.cursor, self.batch)
        return labels

    def on_each(self, act):
        """Calls `act` for each rank in a separate thread, with a function that gathers.

        Values are converted to JSON and back, because real ranks send JSON.
        """
        barrier = threading.Barrier(len(self.data))
        sent = [None] * len(self.data)

        def run(rank):
            def gather(value):
                sent[rank] = json.dumps(value)
                barrier.wait(60)
                gathered = [json.loads(text) for text in sent]
                barrier.wait(60)
                return gathered

            return act(self.data[rank], gather)

        with concurrent.futures.ThreadPoolExecutor(len(self.data)) as pool:
            return list(pool.map(run, range(len(self.data))))

    def end(self, epoch):
        """Returns the record of an epoch on each rank."""

        def act(data, gather):
            communicator = types.SimpleNamespace(allgather_object=gather)
            logs = {}
            run = FakeRun(RunState(self.cursor), communicator=communicator)
            attach(ExampleCount(data), run).on_epoch_end(epoch, logs)
            return {key: logs[key] for key in ("train_count", "train_dropped", "bad_records")}

        return self.on_each(act)

    def saved(self, epoch):
        """Returns the content of a checkpoint as it is read again."""
        return json.loads(
            json.dumps(
                self.on_each(lambda data, gather: replaced_on_all_ranks(data, epoch, gather))[0]
            )
        )


def bad_source(**arguments):
    return MemorySource(N, bad={17, 18}, undecodable={44}, **arguments)


def test_example_count_counts_bad_records_once_over_ranks():
    """Uses batches of 8, which do not divide 60, so one batch belongs to two epochs."""
    ranks = Ranks(bad_source(), 2)
    for epoch in (0, 1):
        ranks.train(ranks.order.batches_in_epoch(8, ranks.cursor.offset))
        records = ranks.end(epoch)
        assert records[0] == records[1]
        assert records[0] == {"train_count": N - 3, "train_dropped": 3, "bad_records": 3}
    assert (
        {*ranks.data[0].bad_records.reasons} == {*ranks.data[1].bad_records.reasons} == {17, 18, 44}
    )


def test_example_count_continues_after_a_restart_on_another_number_of_ranks():
    before = Ranks(bad_source(), 2)
    before.train(5)
    after = Ranks(bad_source(), 3, before.cursor, before.saved(0))
    # The last step takes 4 examples of the next epoch.
    after.train(2)
    assert after.cursor == Cursor(1, 4)
    # This restart is between the last step and the end of the epoch.
    last = Ranks(bad_source(), 1, after.cursor, after.saved(0))
    records = last.end(0)
    assert (records[0]["train_count"], records[0]["train_dropped"]) == (57, 3)
    last.train(14)
    records = last.end(1)
    assert (records[0]["train_count"], records[0]["train_dropped"]) == (57, 3)


def test_example_count_above_max_bad_records_of_all_ranks_is_rejected():
    ranks = Ranks(bad_source(), 2, limit=2)
    for data in ranks.data:
        data.bad_records.reasons.update({17 if data is ranks.data[0] else 44: "bad"})
    ranks.data[0].bad_records.reasons[18] = "bad"

    def end(data, gather):
        with pytest.raises(UserError, match=r"--max_bad_records=2 .*offset 44000"):
            communicator = types.SimpleNamespace(allgather_object=gather)
            run = FakeRun(RunState(Cursor(1, 0)), communicator=communicator)
            attach(ExampleCount(data), run).on_epoch_end(0, {})

    ranks.on_each(end)


def test_restore_replaced_examples_of_a_damaged_checkpoint_is_rejected():
    with pytest.raises(UserError, match=r"replaced examples .*damaged"):
        Ranks(MemorySource(N), 1, Cursor(0, 8), [8])


@pytest.mark.parametrize(
    ("names", "warnings"), [("ant bee cat dog", 0), ("ant bee cat dog eel", 1)]
)
def test_check_class_list_with_unused_classes_warns_once(names, warnings, tmp_path, caplog):
    pictures = [support.jpeg(number, 12, 16) for number in range(8)]
    support.write_shards(
        tmp_path, "train", [(pictures[number % 8], number % 4) for number in range(N)]
    )
    class_list = tmp_path / "labels.txt"
    class_list.write_text("\n".join(names.split()))
    ranks = Ranks(DatasetRequest("tfrecord", str(tmp_path)).open(), 2)
    for epoch in range(2):
        ranks.train(8 if epoch == 0 else 7)
        ranks.end(epoch)
    lines = [record.message for record in caplog.records if "labels.txt" in record.message]
    assert (
        lines
        == [f"data: {class_list}: lists 5 classes, but no training image has a label above 3"]
        * warnings
    )


def test_check_class_list_after_the_rest_of_an_epoch_does_not_warn(tmp_path, caplog):
    support.write_shards(
        tmp_path, "train", [(support.jpeg(1, 12, 16), number % 4) for number in range(N)]
    )
    (tmp_path / "labels.txt").write_text("ant\nbee\ncat\ndog")
    data = Ranks(DatasetRequest("tfrecord", str(tmp_path)).open(), 1, Cursor(0, 56)).data[0]
    data.check_class_list(0, Cursor(1, 0), 2)
    assert not caplog.records
    data.check_class_list(1, Cursor(2, 0), 2)
    assert "no training image has a label above 2" in caplog.text
