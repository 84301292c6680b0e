"""Wraps every private name of TensorFlow and Keras that this package uses.

A release may rename any of them. `tests/test_private_api.py` has a test for each function here.
When a new release breaks one, change it here only. TensorFlow and Keras are imported inside the
functions, so that importing this module is fast where they are not needed.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


def flatten_layers(model: keras.Model, *, include_self: bool = True) -> list[keras.layers.Layer]:
    """Returns the layers of a model, including the layers inside them.

    Args:
      model: A model of Keras.
      include_self: Whether the model itself is the first of them.
    """
    return list(model._flatten_layers(include_self=include_self))


@contextlib.contextmanager
def layer_numbers_from(start: Mapping[str, int]) -> Iterator[Mapping[str, int]]:
    """Numbers unnamed layers and variables inside the block independently of the process.

    After the block, numbering continues where it was before.

    Args:
      start: How many layers have each automatic name already; {} as in a new process.

    Yields:
      The same numbers, which include the layers of the block as soon as they are built.
    """
    from keras.src.backend.common import global_state

    counters = global_state.get_global_attribute("object_name_uids")
    numbers = collections.defaultdict(int, start)
    global_state.set_global_attribute("object_name_uids", numbers)
    try:
        yield numbers
    finally:
        global_state.set_global_attribute("object_name_uids", counters)


def initial_epoch(model: keras.Model) -> int | None:
    """Returns the epoch that overrides the initial epoch of `fit`, or None."""
    epoch: int | None = getattr(model, "_initial_epoch", None)
    return epoch


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Makes `fit` begin with this epoch, as Keras's BackupAndRestore does.

    Args:
      model: The model that is trained.
      epoch: Counted from 0; None makes `fit` use its argument again.
    """
    model._initial_epoch = epoch


def loss_tracker(model: keras.Model) -> keras.metrics.Mean | None:
    """Returns the metric in which Keras's own `train_step` averages the loss.

    It is None before `compile`.
    """
    return model._loss_tracker


def metrics_by_owner(model: keras.Model) -> dict[str, list[keras.metrics.Metric]]:
    """Returns the metrics of a model by the part of it that created them.

    The parts are "loss", "compiled" (the metrics of `compile`), "losses" (one per output), and
    "own" (of the model and its layers). The first step creates the metrics of "compiled" and
    "losses".
    """
    compiled = [metric for metric in (model._compile_metrics,) if metric is not None]
    losses = list(model._compile_loss.metrics) if model._compile_loss is not None else []
    groups = {"loss": [model._loss_tracker], "compiled": compiled, "losses": losses}
    ids = {id(metric) for metrics in groups.values() for metric in metrics}
    return groups | {"own": [metric for metric in model.metrics if id(metric) not in ids]}


def producing_operation(tensor: Any) -> tuple[Any, int]:
    """Returns the operation that produced a symbolic tensor of Keras.

    Returns:
      The operation, and the index of the tensor among its outputs.
    """
    history = tensor._keras_history
    return history.operation, history.tensor_index


def trainable_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the variables that an optimizer was built with, in the same order."""
    variables: list[keras.Variable] = optimizer._trainable_variables
    return variables


def is_weight_decayed(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> bool:
    """Returns whether `exclude_from_weight_decay` has not excluded a variable."""
    return bool(optimizer._use_weight_decay(variable))


def learning_rate_variable(optimizer: keras.optimizers.Optimizer) -> keras.Variable | None:
    """Returns the variable with an optimizer's learning rate.

    It is None if the optimizer does not have one, as MultiOptimizer.
    """
    return getattr(optimizer, "_learning_rate", None)


def wrap_tf_variable(variable: tf.Variable) -> keras.Variable:
    """Returns a variable of Keras that shares its value with one of TensorFlow.

    Keras does not document that it shares a tf.Variable that is passed as the initial value.
    """
    import keras

    name = variable.name.partition(":")[0].replace("/", "_")
    shared = keras.Variable(
        variable, dtype=variable.dtype.name, trainable=variable.trainable, name=name
    )
    shared.constraint = variable.constraint
    return shared


def running_callbacks() -> Sequence[keras.callbacks.Callback]:
    """Returns all callbacks of the running `fit`; a method of a callback must call it.

    Returns:
      The callbacks, or () outside `fit`.
    """
    callback_list = _running_callback_list()
    return tuple(callback_list.callbacks) if callback_list is not None else ()


def insert_callback(callback: keras.callbacks.Callback, position: int) -> None:
    """Adds a callback to those of the running `fit`; a method of a callback must call it.

    The event that is being called does not reach it, but all later ones do. Outside `fit` nothing
    happens.

    Args:
      callback: Needs neither a model nor parameters.
      position: Index in `running_callbacks` before which it is inserted.
    """
    callback_list = _running_callback_list()
    if callback_list is not None:
        # A new list, because Keras is iterating over the present one.
        callbacks = list(callback_list.callbacks)
        callbacks.insert(position, callback)
        callback_list.callbacks = callbacks


def _running_callback_list() -> Any:
    """Returns Keras's list of the callbacks that calls them at present, or None.

    Keras does not give a callback access to the others. The list is found in the frame of its
    method that calls all callbacks.
    """
    import keras

    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.callbacks.CallbackList):
            return caller
        frame = frame.f_back
    return None


def running_fit_data() -> Any:
    """Returns Keras's adapter of the data of the running `fit`.

    A method of a callback must call it. `batch_size` and `get_tf_dataset()` of the adapter describe
    the data.

    Returns:
      The adapter, or None outside `fit`.
    """
    iterator = running_epoch_iterator()
    return None if iterator is None else iterator.data_adapter


def running_epoch_iterator() -> Any:
    """Returns what `fit` draws its batches from, or None outside `fit`.

    It is read from the frame of `fit`, because Keras does not give it to callbacks.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "fit" and "epoch_iterator" in frame.f_locals:
            return frame.f_locals["epoch_iterator"]
        frame = frame.f_back
    return None


class RunningFitData:
    """The training data of the running `fit`, whose batches can be replaced before an epoch.

    Attributes:
      adapter: Keras's adapter of the data.
      dataset: A `tf.data.Dataset` of the batches of an epoch.
      num_batches: Batches of the dataset; None if their number is not known.
      continues_over_epochs: Whether an epoch begins where the one before has ended, as it does with
        `steps_per_epoch`.
    """

    def __init__(self) -> None:
        """Finds the data; a method of a callback must call it, inside `fit`."""
        self._iterator = running_epoch_iterator()
        self.adapter = self._iterator.data_adapter
        self.dataset = self._iterator._distributed_dataset
        self.num_batches: int | None = self._iterator._num_batches
        self.continues_over_epochs = self._iterator.steps_per_epoch is not None

    def set_epoch(self, dataset: tf.data.Dataset, num_batches: int | None) -> None:
        """Sets the batches of the next epoch; call it in `on_epoch_begin`.

        Args:
          dataset: Batches of the epoch.
          num_batches: Number of these batches; None if it is not known.
        """
        self._iterator._distributed_dataset = dataset
        self._iterator._num_batches = num_batches

    @property
    def are_arrays(self) -> bool:
        """Whether the data are arrays."""
        from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

        return isinstance(self.adapter, ArrayDataAdapter)

    @property
    def are_shuffled(self) -> bool:
        """Whether `fit` shuffles the arrays, or the batches of the PyDataset."""
        return bool(self.adapter._shuffle if self.are_arrays else self.adapter.shuffle)

    def array_dataset(self, shuffle: Callable[[tf.Tensor], tf.Tensor]) -> tf.data.Dataset:
        """Returns the batches of arrays, in an order that a function sets.

        Args:
          shuffle: Function that the graph of the dataset calls with indices, instead of
            `tf.random.shuffle`.
        """
        import tensorflow as tf

        # Keras has no argument for the order, and calls this function while it builds the dataset.
        shuffle_of_tensorflow = tf.random.shuffle
        tf.random.shuffle = shuffle
        try:
            return self.adapter.get_tf_dataset()
        finally:
            tf.random.shuffle = shuffle_of_tensorflow

    @property
    def py_dataset(self) -> keras.utils.PyDataset | None:
        """The user's PyDataset, or None for other data."""
        from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

        return self.adapter.py_dataset if isinstance(self.adapter, PyDatasetAdapter) else None

    def replace_py_dataset(self, dataset: keras.utils.PyDataset) -> None:
        """Makes `fit` read the batches of another PyDataset, in their order."""
        self.adapter.py_dataset = dataset
        self.adapter.shuffle = False
        if self.adapter.enqueuer is not None:
            self.adapter.enqueuer.py_dataset = dataset
            self.adapter.enqueuer.shuffle = False


def global_seed() -> int | None:
    """Returns the seed of `tf.random.set_seed`, which `keras.utils.set_random_seed` calls too."""
    seed: int | None = eager_context()._seed
    return seed


def blocking_modules() -> tuple[ModuleType, ...]:
    """Returns the modules of TensorFlow in which the main thread blocks.

    It is there while a step runs or a value is fetched.
    """
    from tensorflow.python.eager import execute
    from tensorflow.python.framework import ops

    return execute, ops


def eager_context() -> Any:
    """Returns TensorFlow's context, which connects to servers in other processes."""
    from tensorflow.python.eager import context

    return context.context()


def tensorflow_was_used() -> bool:
    """Returns whether this process has imported TensorFlow and run an operation."""
    module = sys.modules.get("tensorflow.python.eager.context")
    return module is not None and bool(module.context()._initialized)


def is_compiled_by_xla() -> bool:
    """Returns whether the graph that is being traced will be compiled by XLA."""
    import tensorflow as tf
    from tensorflow.python.ops import control_flow_util

    return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def is_op_determinism_enabled() -> bool:
    """Returns whether `tf.config.experimental.enable_op_determinism` was called."""
    from tensorflow.python.framework import config

    return bool(config.is_op_determinism_enabled())


def dataset_inputs(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns the input datasets of a dataset."""
    return list(dataset._inputs())


def dataset_graphs(dataset: tf.data.Dataset) -> list[Any]:
    """Returns the GraphDef of each function that a dataset calls, as in `interleave`."""
    return [function.function.graph.as_graph_def() for function in dataset._functions()]


def dataset_captures(dataset: tf.data.Dataset) -> list[tf.Tensor]:
    """Returns the tensors that the functions of a dataset captured, without handles."""
    captures = [
        tensor for function in dataset._functions() for tensor in function.function.captured_inputs
    ]
    return [tensor for tensor in captures if tensor.dtype.name not in ("resource", "variant")]


def dataset_tensors(dataset: tf.data.Dataset) -> list[tf.Tensor]:
    """Returns the tensors of `from_tensor_slices` or `from_tensors`; else []."""
    return [tensor for tensor in getattr(dataset, "_tensors", []) if tensor.dtype.name != "variant"]


def dataset_seeds(dataset: tf.data.Dataset) -> tuple[int, int] | None:
    """Returns the two seeds of a dataset that shuffles or draws random numbers.

    Returns:
      The seeds; (0, 0) if none was set, and None for a dataset that is not random.

    Raises:
      RuntimeError: If this release of TensorFlow stores the seeds of a shuffle elsewhere.
    """
    first = getattr(dataset, "_seed", None)
    second = getattr(dataset, "_seed2", None)
    if first is None and "Shuffle" in type(dataset).__name__:
        raise RuntimeError(
            "private_api.dataset_seeds cannot find the seeds of TensorFlow's"
            f" {type(dataset).__name__}. Adapt it to this release of TensorFlow."
        )
    if first is None or second is None:
        return None
    return (int(first), int(second))


def dataset_batch_size(dataset: tf.data.Dataset) -> int | None:
    """Returns the examples in an element of a dataset, or None if they are not known.

    A batch that may be partial has no static size, so that of `Dataset.batch` is looked for before
    steps that do not change it. A `map` is taken for one of them.
    """
    import tensorflow as tf
    from tensorflow.python.data.ops import dataset_ops

    first = tf.nest.flatten(dataset.element_spec)[0]
    shape = getattr(first, "shape", None)
    if shape is not None and shape.rank and shape[0] is not None:
        return int(shape[0])
    while True:
        size = getattr(dataset, "_batch_size", None)
        if size is not None:
            return int(size)
        keeps_batch = isinstance(dataset, dataset_ops.UnaryUnchangedStructureDataset)
        if not keeps_batch and type(dataset).__name__ not in ("_MapDataset", "_ParallelMapDataset"):
            return None
        (dataset,) = dataset_inputs(dataset)


def dataset_chooses_inputs(dataset: tf.data.Dataset) -> bool:
    """Returns whether the first input of a dataset chooses which other input is next."""
    return type(dataset).__name__ == "_DirectedInterleaveDataset"


def dataset_is_nondeterministic(dataset: tf.data.Dataset) -> bool:
    """Returns whether the order of elements depends on which parallel call ends first."""
    return (
        getattr(dataset, "_deterministic", None) == "false"
        or dataset.options().deterministic is False
    )


def walk_datasets(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields a dataset, its inputs, and their inputs."""
    yield dataset
    for source in dataset_inputs(dataset):
        yield from walk_datasets(source)
