"""Describes the order of examples, so that ranks can compare it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hybrid_imagenet import private_api
from hybrid_imagenet.errors import UserError

# Number of examples of an array that are compared. Two differently shuffled arrays almost never
# agree in all of them.
_SAMPLE_SIZE = 16
# Tensors that a dataset's function captures are compared if they have at least this many elements.
# Shorter ones may be the seeds of a random augmentation, which should differ between ranks.
_MIN_CAPTURED_LENGTH = 100


def fingerprint_arrays(arrays: Sequence[np.ndarray]) -> dict[str, Any]:
    """Returns facts about arrays that have the same length (see `order.notes.ShardNote`)."""
    return {
        "the number of examples": len(arrays[0]),
        "the examples": [_project_sample(array) for array in arrays],
    }


def fingerprint_dataset(dataset: tf.data.Dataset) -> dict[str, Any]:
    """Returns facts about a dataset (see `order.notes.ShardNote`) without reading it.

    The facts include a sample of the examples, or of their paths or numbers, if these are in
    memory. What Python generators yield is not included.

    Raises:
      UserError: If the order of the dataset is certain to differ between ranks.
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
        examples += [_project_sample(tensor) for tensor in private_api.dataset_tensors(part)]
        for graph in private_api.dataset_graphs(part):
            seeds += _seeds_of_graph(graph)
            examples += [_project_sample(array) for array in _constants(graph)]
        captured = private_api.dataset_captures(part)
        examples += [
            _project_sample(tensor)
            for tensor in captured
            if tensor.shape[:1].num_elements() >= _MIN_CAPTURED_LENGTH
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
    """Yields the seeds that decide a dataset's order, without those of its inputs."""
    seeds = private_api.dataset_seeds(dataset)
    # A dataset without inputs generates random numbers, which do not decide an order unless they
    # choose between datasets (see below).
    if seeds is not None and private_api.dataset_inputs(dataset):
        yield list(seeds)
    if private_api.dataset_chooses_inputs(dataset):
        for part in private_api.walk_datasets(private_api.dataset_inputs(dataset)[0]):
            seeds = private_api.dataset_seeds(part)
            if seeds is not None and not private_api.dataset_inputs(part):
                yield list(seeds)


def _seeds_of_graph(graph: Any) -> Iterator[list[int]]:
    """Yields the seeds of shuffles inside a dataset's functions, as in `interleave`.

    The two seeds of a shuffle are computed from constants of the graph. If the user sets no seed,
    all of these constants are 0.
    """
    for nodes in _functions(graph):
        by_name = {node.name: node for node in nodes}
        for node in nodes:
            # The operations are ShuffleDataset, its versions V2 and V3, and
            # ShuffleAndRepeatDataset.
            if node.op.startswith("Shuffle"):
                seed_values: list[int] = []
                for name in node.input[2:4]:
                    seed_values += _constant_inputs(name, by_name)
                yield seed_values


def _constant_inputs(name: str, by_name: Mapping[str, Any]) -> Iterator[int]:
    """Yields the scalar constants from which an operation of a graph is computed."""
    node = by_name.get(name.partition(":")[0])
    if node is None:
        return
    if node.op == "Const" and not node.attr["value"].tensor.tensor_shape.dim:
        yield int(_value(node))
    for source in node.input:
        yield from _constant_inputs(source, by_name)


def _constants(graph: Any) -> Iterator[np.ndarray]:
    """Yields the constant arrays in the functions of a dataset."""
    for nodes in _functions(graph):
        for node in nodes:
            if node.op == "Const":
                dimensions = node.attr["value"].tensor.tensor_shape.dim
                if dimensions and dimensions[0].size >= _MIN_CAPTURED_LENGTH:
                    yield _value(node)


def _value(constant: Any) -> np.ndarray:
    """Returns the value of an operation whose type is Const."""
    array: np.ndarray = tf.make_ndarray(constant.attr["value"].tensor)
    return array


def _functions(graph: Any) -> Iterator[Sequence[Any]]:
    yield graph.node
    for function in graph.library.function:
        yield function.node_def


def _project_sample(array: Any) -> list[float]:
    """Returns one number for each of a few examples of an array.

    The number identifies the example. For numbers it is a random projection, which rounding hardly
    changes. For strings it is a checksum. If the strings are paths, only the file name counts,
    because hosts may keep the same files in different directories.
    """
    is_scalar = not len(array.shape)
    if is_scalar:
        array = array[None]
    rows = np.unique(np.linspace(0, max(len(array) - 1, 0), _SAMPLE_SIZE).astype(int))[: len(array)]
    values = np.stack([np.asarray(array[row]) for row in rows]) if len(rows) else np.zeros([0, 0])
    values = values.reshape(len(rows), -1)
    if values.dtype.kind in "biuf":
        projection = np.random.default_rng(0).standard_normal(values.shape[1])
        return [float(value) for value in np.nan_to_num(values.astype(np.float64)) @ projection]
    return [float(zlib.crc32(b"\n".join(map(_file_name, row)))) for row in values]


def _file_name(value: Any) -> bytes:
    text = value if isinstance(value, bytes) else str(value).encode()
    return text.rpartition(b"/")[2]
