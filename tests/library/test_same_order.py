"""Ranks that shard differently ordered examples are stopped before they train."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import hybrid_imagenet as hi
from hybrid_imagenet.errors import SharedError, UserError
from hybrid_imagenet.order import notes
from hybrid_imagenet.order.same_order import check_same_order
from tests.library import programs

COUNT = 200
NUMBERS = tf.data.Dataset.range(COUNT)


@pytest.fixture(autouse=True)
def no_global_seed():
    tf.random.set_seed(None)
    yield
    tf.random.set_seed(None)
    notes.take(0, 1)


def compare(of_rank):
    """Compares the order of the data of two ranks; `of_rank` returns the data of a rank."""
    notes_by_rank = []
    for rank in range(2):
        hi.data.shard(of_rank(rank), rank, 2)
        notes_by_rank.append(notes.take(rank, 2))
    assert notes_by_rank[0]
    check_same_order(mock.Mock(size=2, rank=0, allgather_object=lambda facts: notes_by_rank))


def permuted(seed):
    return np.random.default_rng(seed).permutation(COUNT)


def shuffled_by_global_seed(seed):
    tf.random.set_seed(seed)
    return NUMBERS.shuffle(10)


def shuffled_by_keras_seed(seed):
    keras.utils.set_random_seed(seed)
    return keras.utils.split_dataset(np.arange(COUNT), 0.5, shuffle=True)[0]


def interleaved(seed):
    return tf.data.Dataset.range(4).interleave(
        lambda i: tf.data.Dataset.range(50).shuffle(9, seed=seed)
    )


def sampled_from_two(seed):
    return tf.data.Dataset.sample_from_datasets([NUMBERS, NUMBERS], [0.5, 0.5], seed=seed)


def gathered_from(values):
    return NUMBERS.map(lambda i: tf.gather(values, i))


# Each function returns the data that a rank passes to `shard`, given its seed.
SHUFFLES = {
    "shuffle": lambda seed: NUMBERS.shuffle(10, seed=seed).batch(2).prefetch(1),
    "global seed": shuffled_by_global_seed,
    "interleave": interleaved,
    "flat_map in flat_map": lambda seed: tf.data.Dataset.range(2).flat_map(
        lambda i: interleaved(seed)
    ),
    "zip and concatenate": lambda seed: tf.data.Dataset.zip(
        NUMBERS, NUMBERS.concatenate(NUMBERS.shuffle(5, seed=seed))
    ),
    "sample_from_datasets": sampled_from_two,
    "list_files": lambda seed: tf.data.Dataset.list_files(
        f"{hi.__path__[0]}/*.py", shuffle=True, seed=seed
    ),
    "split_dataset": shuffled_by_keras_seed,
    "arrays": lambda seed: (permuted(seed), permuted(seed)[:, None] * np.ones(3)),
    "images": lambda seed: np.random.default_rng(7).integers(0, 256, (COUNT, 4, 4, 3), np.uint8)[
        permuted(seed)
    ],
    "strings": lambda seed: permuted(seed).astype(str),
    "from_tensor_slices": lambda seed: tf.data.Dataset.from_tensor_slices(
        {"x": permuted(seed)}
    ).map(lambda x: x),
    "captured array": lambda seed: gathered_from(permuted(seed)),
    "captured tensor": lambda seed: gathered_from(tf.constant(permuted(seed))),
}


@pytest.mark.parametrize("name", SHUFFLES)
def test_shard_with_different_seeds_on_ranks_is_rejected(name):
    compare(lambda rank: SHUFFLES[name](3))
    with pytest.raises(
        SharedError, match=r"Rank 1 and rank 0 divide data in different orders: .* differ\. The "
    ):
        compare(lambda rank: SHUFFLES[name](3 + rank))


def in_any_order(*, calls=2):
    return NUMBERS.map(lambda x: x, num_parallel_calls=calls, deterministic=False).batch(2)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: interleaved(None), "shuffles without a seed"),
        (lambda: sampled_from_two(None), "shuffles without a seed"),
        (lambda: tf.data.Dataset.list_files(f"{hi.__path__[0]}/*.py"), "shuffles without a seed"),
        (lambda: tf.data.Dataset.zip(NUMBERS, NUMBERS.shuffle(3)), "shuffles without a seed"),
        (in_any_order, "deterministic=False"),
    ],
)
def test_shard_of_an_unseeded_order_is_rejected_at_once(make, reason):
    with pytest.raises(UserError, match=reason):
        hi.data.shard(make(), 0, 2)


def test_shard_of_data_that_may_differ_between_ranks_is_accepted():
    def augmented(rank):
        seeds = tf.data.Dataset.random(seed=rank)
        small = tf.constant([rank, 5])
        return tf.data.Dataset.zip(NUMBERS, seeds).map(
            lambda x, seed: x + tf.cast(small[0], tf.int64)
        )

    compare(augmented)
    compare(lambda rank: np.array([f"/local/{rank}/a{i}.jpg" for i in range(COUNT)]))
    compare(lambda rank: permuted(1) / 3 * (1 + rank * 1e-6))


def test_check_same_order_accepts_more_shards_on_one_rank():
    notes_by_rank = []
    for rank, seeds in ((0, (1, 2, 9)), (1, (1, 9))):
        for seed in seeds:
            hi.data.shard(permuted(seed), rank, 2)
        notes_by_rank.append(notes.take(rank, 2))
    check_same_order(mock.Mock(size=2, rank=0, allgather_object=lambda facts: notes_by_rank))
    hi.data.shard(permuted(3), 1, 2)
    notes_by_rank[1] += notes.take(1, 2)
    with pytest.raises(SharedError, match="the examples differ"):
        check_same_order(mock.Mock(size=2, rank=0, allgather_object=lambda facts: notes_by_rank))


def test_check_same_order_of_samplers_with_different_seeds_is_rejected():
    notes_by_rank = []
    for rank in range(2):
        hi.order.ExactBatchSampler(20, 2, rank=rank, size=2, seed=rank)
        notes_by_rank.append(notes.take(rank, 2))
    with pytest.raises(SharedError, match="the seed of the order differ"):
        check_same_order(mock.Mock(size=2, rank=0, allgather_object=lambda facts: notes_by_rank))


def test_fit_of_ranks_with_different_orders_is_rejected_before_training(pools, tmp_path):
    image = np.zeros((2, 2, 3), np.uint8)
    for number in range(40):
        folder = tmp_path / f"class{number % 2}"
        folder.mkdir(exist_ok=True)
        keras.utils.save_img(folder / f"{number}.png", image + number)
    for result in pools[2].call(programs.different_orders, str(tmp_path)):
        assert result["same seed"] is None
        for call in ("fit", "loop", "evaluate", "another global seed"):
            assert result[call].startswith(
                "Rank 1 and rank 0 divide data in different orders: the seeds of shuff"
            ), call
