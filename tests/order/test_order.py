"""The public order: each example exactly once per epoch, resumed anywhere."""

import itertools

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order import ExactBatchSampler, evaluation_batches, keras_dataset

COUNT = 64
BATCH = 4
SEED = 3


def read_ahead(batches, ahead):
    """Reads batches like a loader with workers.

    It reads `ahead` batches when it starts, and then returns one for each that it reads.
    """
    source = iter(batches)
    ready = list(itertools.islice(source, ahead))

    def rest():
        for batch in source:
            ready.append(batch)
            yield ready.pop(0)
        yield from ready

    return rest()


def trained(sampler, passes, ahead=3):
    """Yields the batches of several passes of a trainer, which counts each of them."""
    for _ in range(passes):
        for batch in read_ahead(sampler, ahead):
            sampler.advance()
            yield batch


@given(
    n=st.integers(1, 120),
    seed=st.integers(0, 2**40),
    runs=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(0, 25)), min_size=1, max_size=6
    ),
    ahead=st.integers(0, 6),
)
@settings(max_examples=40, deadline=None)
def test_sampler_over_interruptions_yields_each_example_once_per_epoch(n, seed, runs, ahead):
    state = {"epoch": 0, "offset": 0}
    examples = []
    # Each run is killed after some steps, and loses the batches that were read ahead.
    for size, batch, steps in runs:
        ranks = [
            ExactBatchSampler(n, batch, rank=rank, size=size, seed=seed) for rank in range(size)
        ]
        for sampler in ranks:
            sampler.load_state_dict(state)
        streams = [itertools.islice(trained(sampler, 10**6, ahead), steps) for sampler in ranks]
        for slices in zip(*streams, strict=True):
            examples += itertools.chain(*slices)
        states = [sampler.state_dict() for sampler in ranks]
        assert states == [states[0]] * size
        state = states[0]
        assert (state["epoch"], state["offset"]) == divmod(len(examples), n)
    undisturbed = ExactBatchSampler(n, 1, seed=seed)
    assert examples == list(
        itertools.islice(itertools.chain.from_iterable(trained(undisturbed, 10**6)), len(examples))
    )
    for start in range(0, len(examples) - n + 1, n):
        assert sorted(examples[start : start + n]) == list(range(n))


def test_state_dict_does_not_count_batches_that_were_read_ahead():
    sampler = ExactBatchSampler(COUNT, BATCH, seed=SEED)
    loader = read_ahead(sampler, 5)
    first = [next(loader) for _ in range(2)]
    assert sampler.state_dict() == {"epoch": 0, "offset": 0}
    sampler.advance(2)
    assert sampler.state_dict() == sampler.state_after(2) == {"epoch": 0, "offset": 8}
    assert sampler.state_after(17) == {"epoch": 1, "offset": 4}
    resumed = ExactBatchSampler(COUNT, 2 * BATCH, seed=SEED)
    resumed.load_state_dict(sampler.state_dict())
    rest = list(itertools.chain.from_iterable(resumed))
    assert sorted([*itertools.chain(*first), *rest]) == list(range(COUNT))


def test_sampler_length_is_that_of_the_current_pass():
    sampler = ExactBatchSampler(10, 4, seed=SEED)
    lengths = []
    for _ in range(4):
        lengths.append(len(sampler))
        for _ in trained(sampler, 1):
            assert lengths[-1] == len(sampler) or sampler.epoch == len(lengths)
    assert lengths == [3, 2, 3, 2]
    assert sampler.longest == 3
    assert (sampler.epoch, sampler.position) == (4, 4.0)


def test_sampler_pass_may_be_abandoned_and_started_again():
    sampler = ExactBatchSampler(COUNT, BATCH, seed=SEED)
    first = next(iter(sampler))
    assert next(iter(sampler)) == first
    # A trainer may limit the batches of an epoch.
    for number, _ in enumerate(sampler):
        sampler.advance()
        if number == 4:
            break
    assert next(iter(sampler)) == ExactBatchSampler(COUNT, BATCH, seed=SEED).batch(5).tolist()


def test_sampler_second_pass_without_advance_is_rejected():
    sampler = ExactBatchSampler(COUNT, BATCH)
    list(sampler)
    with pytest.raises(UserError, match=r"advance\(\)"):
        iter(sampler)
    # Here the caller has counted the batches.
    sampler.load_state_dict(sampler.state_after(len(sampler)))
    assert list(sampler) == list(trained(ExactBatchSampler(COUNT, BATCH), 2))[16:]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ExactBatchSampler(0, 1),
        lambda: ExactBatchSampler(5, 0),
        lambda: ExactBatchSampler(5, 1, rank=2, size=2),
        lambda: ExactBatchSampler(5, 1).load_state_dict({"epoch": 0}),
        lambda: ExactBatchSampler(5, 1).load_state_dict({"epoch": 0, "offset": 5}),
        lambda: ExactBatchSampler(5, 1).load_state_dict({"epoch": -1, "offset": 0}),
        lambda: evaluation_batches(5, 1, rank=1),
        lambda: evaluation_batches(0, 1),
    ],
)
def test_sampler_with_invalid_arguments_or_states_is_rejected(wrong):
    with pytest.raises(UserError):
        wrong()


@given(st.integers(1, 200), st.integers(1, 17), st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_evaluation_batches_on_any_number_of_ranks_count_each_example_once(n, batch, size):
    rank_batches = [evaluation_batches(n, batch, rank=rank, size=size) for rank in range(size)]
    assert len({len(batches) for batches in rank_batches}) == 1
    counted = np.zeros(n)
    for examples, weights in itertools.chain(*rank_batches):
        assert (examples.shape, weights.shape, weights.dtype) == ((batch,), (batch,), np.float32)
        np.add.at(counted, examples, weights)
    assert (counted == 1).all()


def test_sampler_iterator_created_before_load_state_dict_is_rejected():
    whole = list(trained(ExactBatchSampler(COUNT, BATCH, seed=SEED), 3))
    sampler = ExactBatchSampler(COUNT, BATCH, seed=SEED)
    loader = read_ahead(sampler, 3)
    sampler.load_state_dict({"epoch": 2, "offset": 0})
    with pytest.raises(UserError, match="Create a new one"):
        next(loader)
    assert list(read_ahead(sampler, 3)) == whole[32:]


class TestTorch:
    """Runs PyTorch's loader with workers."""

    @pytest.mark.parametrize("persistent", [False, True])
    def test_loader_with_workers_resumes_at_the_next_example(self, persistent):
        data = pytest.importorskip("torch.utils.data")

        def loader(sampler):
            options = {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": persistent}
            return data.DataLoader(list(range(COUNT)), batch_sampler=sampler, **options)

        def run(sampler, passes, stop=None):
            batches = loader(sampler)
            for number, batch in enumerate(
                itertools.chain.from_iterable(batches for _ in range(passes))
            ):
                if number == stop:
                    return
                sampler.advance()
                yield batch.tolist()

        whole = list(run(ExactBatchSampler(COUNT, BATCH, seed=SEED), 2))
        sampler = ExactBatchSampler(COUNT, BATCH, seed=SEED)
        first = list(run(sampler, 2, stop=21))
        resumed = ExactBatchSampler(COUNT, BATCH, seed=SEED)
        resumed.load_state_dict(sampler.state_dict())
        assert first + list(run(resumed, 1)) == whole


class StopAfter(keras.callbacks.Callback):
    """Interrupts training after some batches."""

    def __init__(self, left):
        super().__init__()
        self.left = left

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


class TestKeras:
    """Runs `fit` with a model that records which examples it trains on."""

    @staticmethod
    def model(notes):
        class RecordingModel(keras.Sequential):
            def train_step(self, data):
                notes.append(np.asarray(data[0])[:, 0].astype(int).tolist())
                return super().train_step(data)

        model = RecordingModel([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-6), "mse", run_eagerly=True)
        return model

    @staticmethod
    def load(examples):
        return examples[:, None].astype(np.float32), np.zeros((len(examples), 1), np.float32)

    def fit(self, sampler, notes, epochs, *callbacks, **options):
        data = keras_dataset(sampler, self.load)
        options = {"shuffle": False, "verbose": 0, **options}
        all_callbacks = [data.counter, *callbacks]
        self.model(notes).fit(
            data, initial_epoch=sampler.epoch, epochs=epochs, callbacks=all_callbacks, **options
        )

    @pytest.mark.parametrize("count", [22, 24])
    def test_fit_resumed_inside_an_epoch_equals_one_run(self, count, recwarn):
        whole = []
        notes = []
        self.fit(ExactBatchSampler(count, BATCH, seed=SEED), whole, 4)
        assert whole == list(trained(ExactBatchSampler(count, BATCH, seed=SEED), 4))
        sampler = ExactBatchSampler(count, BATCH, seed=SEED)
        with pytest.raises(KeyboardInterrupt):
            self.fit(sampler, notes, 4, StopAfter(10))
        assert sampler.state_dict() == {"epoch": 1, "offset": 40 - count}
        resumed = ExactBatchSampler(count, BATCH, seed=SEED)
        resumed.load_state_dict(sampler.state_dict())
        self.fit(resumed, notes, 4)
        assert notes == whole
        assert resumed.epoch == 4
        assert not [w for w in recwarn if "ran out of data" in str(w.message)]

    def test_fit_with_several_steps_per_execution_counts_all_steps(self):
        # The three passes have 6, 5 and 6 batches.
        sampler = ExactBatchSampler(22, BATCH, seed=SEED)
        data = keras_dataset(sampler, self.load)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-6), "mse", steps_per_execution=4, jit_compile=False)
        model.fit(data, epochs=3, shuffle=False, verbose=0, callbacks=[data.counter])
        assert sampler.state_dict() == {"epoch": 3, "offset": 17 * BATCH - 66}
        assert int(model.optimizer.iterations) == 17

    @pytest.mark.parametrize(
        ("options", "remedy"),
        [({"shuffle": True}, "shuffle=False"), ({"steps_per_epoch": 5}, "steps_per_epoch")],
    )
    def test_fit_with_options_that_change_the_order_is_rejected(self, options, remedy):
        with pytest.raises(Exception, match=remedy):
            self.fit(ExactBatchSampler(COUNT, BATCH, seed=SEED), [], 2, **options)

    def test_fit_without_the_counter_is_rejected(self):
        data = keras_dataset(ExactBatchSampler(COUNT, BATCH), self.load)
        with pytest.raises(UserError, match="counter"):
            self.model([]).fit(data, shuffle=False, verbose=0)

    def test_fit_with_backup_and_restore_of_keras_repeats_batches(self, tmp_path):
        """docs/reproducibility.md says that BackupAndRestore(save_freq=...) restores no batch."""
        notes = []
        order = np.arange(COUNT, dtype=np.float32)[:, None]
        fit = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "epochs": 1}
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=1)
        with pytest.raises(KeyboardInterrupt):
            self.model(notes).fit(order, order, callbacks=[backup, StopAfter(6)], **fit)
        self.model(notes).fit(order, order, callbacks=[backup], **fit)
        assert [batch[0] // BATCH for batch in notes] == [*range(6), *range(16)]
