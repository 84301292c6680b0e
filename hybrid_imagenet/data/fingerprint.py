"""Describes the order of arrays and of `tf.data` datasets, to find ranks that divide differently
ordered examples.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hybrid_imagenet import private_api
from hybrid_imagenet.errors import UserError

# Examples of an array that are compared. Two shuffled arrays agree in all of them with next to no
# probability.
_SAMPLE = 16
# Tensors that a function of a dataset uses are compared from this length on. Shorter ones may be
# the seeds of a random augmentation, which should differ by rank.
_MIN_CAPTURED = 100


def of_arrays(arrays: Sequence[np.ndarray]) -> dict[str, Any]:
    """Returns facts about arrays of one length (see `order.notes.Note`)."""
    return {
        "the number of examples": len(arrays[0]),
        "the examples": [_sample(array) for array in arrays],
    }


def of_dataset(dataset: tf.data.Dataset) -> dict[str, Any]:
    """Returns facts about a dataset (see `order.notes.Note`) without reading it.

    Examples are compared where they, their paths or their numbers are in memory. Python generators
    are not seen.

    Raises:
      UserError: if the order of the dataset is certain to differ between ranks.
    """
    seeds: list[list[int]] = []
    examples: list[list[float]] = []
    for part in private_api.walk_datasets(dataset):
        if private_api.dataset_is_nondeterministic(part):
            raise UserError(
                "The dataset yields elements in the order in which parallel calls finish"
                " (deterministic=False), so ranks would share some examples and omit others. Call"
                " hi.data.shard before that part, or omit deterministic=False."
            )
        seeds += _seeds(part)
        examples += [_sample(tensor) for tensor in private_api.dataset_tensors(part)]
        for graph in private_api.dataset_graphs(part):
            seeds += _seeds_of_graph(graph)
            examples += [_sample(array) for array in _constants(graph)]
        captured = private_api.dataset_captures(part)
        examples += [
            _sample(tensor)
            for tensor in captured
            if tensor.shape[:1].num_elements() >= _MIN_CAPTURED
        ]
    if any(values and not any(values) for values in seeds):
        raise UserError(
            "The dataset shuffles without a seed, so its order differs on each rank: ranks would"
            " share some examples and omit others. Shuffle after hi.data.shard, or pass the same"
            " seed on all ranks (list_files, sample_from_datasets and the datasets inside"
            " interleave have one too)."
        )
    return {
        "the number of examples": int(dataset.cardinality()),
        "the seeds of shuffles": seeds,
        "the examples": examples,
    }


def _seeds(dataset: tf.data.Dataset) -> Iterator[list[int]]:
    """Yields the seeds on which the order of a dataset's elements depends; not those of its
    inputs.
    """
    seeds = private_api.dataset_seeds(dataset)
    # Random numbers do not decide an order, unless they choose between datasets (see below).
    if seeds is not None and private_api.dataset_inputs(dataset):
        yield list(seeds)
    if private_api.dataset_chooses_inputs(dataset):
        for part in private_api.walk_datasets(private_api.dataset_inputs(dataset)[0]):
            seeds = private_api.dataset_seeds(part)
            if seeds is not None and not private_api.dataset_inputs(part):
                yield list(seeds)


def _seeds_of_graph(graph: Any) -> Iterator[list[int]]:
    """Yields the seeds of shuffles inside the functions of a dataset, such as that of `interleave`.

    The two seeds of a shuffle are computed from constants of the graph. All constants are 0 without
    a seed.
    """
    for nodes in _functions(graph):
        by_name = {node.name: node for node in nodes}
        for node in nodes:
            # The operations are ShuffleDataset, its versions V2 and V3, and
            # ShuffleAndRepeatDataset.
            if node.op.startswith("Shuffle"):
                yield [
                    value for name in node.input[2:4] for value in _constants_behind(name, by_name)
                ]


def _constants_behind(name: str, by_name: Mapping[str, Any]) -> Iterator[int]:
    """Yields the scalar constants from which an operation of a graph is computed."""
    node = by_name.get(name.partition(":")[0])
    if node is None:
        return
    if node.op == "Const" and not node.attr["value"].tensor.tensor_shape.dim:
        yield int(_value(node))
    for source in node.input:
        yield from _constants_behind(source, by_name)


def _constants(graph: Any) -> Iterator[np.ndarray]:
    """Yields the arrays that a function of a dataset uses."""
    for nodes in _functions(graph):
        for node in nodes:
            if node.op == "Const":
                dimensions = node.attr["value"].tensor.tensor_shape.dim
                if dimensions and dimensions[0].size >= _MIN_CAPTURED:
                    yield _value(node)


def _value(constant: Any) -> np.ndarray:
    """Returns the value of an operation of type Const."""
    array: np.ndarray = tf.make_ndarray(constant.attr["value"].tensor)
    return array


def _functions(graph: Any) -> Iterator[Sequence[Any]]:
    yield graph.node
    for function in graph.library.function:
        yield function.node_def


def _sample(array: Any) -> list[float]:
    """Returns a number for each of some examples of an array, which tells examples apart.

    It is a random projection of numbers, which rounding hardly changes, and a checksum of strings.
    Of paths only the last part counts, because hosts may keep the same files in different
    directories.
    """
    if not len(array.shape):
        array = array[None]
    rows = np.unique(np.linspace(0, max(len(array) - 1, 0), _SAMPLE).astype(int))[: len(array)]
    values = np.stack([np.asarray(array[row]) for row in rows]) if len(rows) else np.zeros([0, 0])
    values = values.reshape(len(rows), -1)
    if values.dtype.kind in "biuf":
        projection = np.random.default_rng(0).standard_normal(values.shape[1])
        return [float(value) for value in np.nan_to_num(values.astype(np.float64)) @ projection]
    return [float(zlib.crc32(b"\n".join(map(_last_part, row)))) for row in values]


def _last_part(value: Any) -> bytes:
    text = value if isinstance(value, bytes) else str(value).encode()
    return text.rpartition(b"/")[2]
