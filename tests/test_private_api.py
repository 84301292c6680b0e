"""Tests of `hybrid_imagenet.private_api`.

Each test fails if a release of TensorFlow or Keras renames what its function uses.
"""

import ast
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import hybrid_imagenet
from hybrid_imagenet import private_api

PACKAGE = pathlib.Path(hybrid_imagenet.__file__).parent


def small_model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="first")], name="whole")


def test_private_api_functions_all_have_a_test():
    tree = ast.parse(pathlib.Path(private_api.__file__).read_text())
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    tests = pathlib.Path(__file__).read_text()
    assert [name for name in functions if f"private_api.{name}(" not in tests] == []


# os._exit, sys._current_frames, and public names of named tuples.
PYTHON_NAMES = {"_exit", "_current_frames", "_replace", "_fields", "_asdict"}


def private_names(tree):
    """Returns the private attributes that a module uses, and the names that it defines."""
    used, defined = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                defined.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                defined.add(name)
            case (
                ast.Attribute(attr=name)
                | ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=name), *_])
            ):
                used.add(name)
    return {name for name in used if re.match("_[a-z]", name)}, defined


# Where TensorFlow and Keras define the names that this package uses.
DEFINING_FILES = (
    (tf, "python/data/ops/*.py"),
    (tf, "python/eager/context.py"),
    (keras, "src/layers/layer.py"),
    (keras, "src/models/*.py"),
    (keras, "src/ops/*.py"),
    (keras, "src/trainers/*.py"),
    (keras, "src/optimizers/*.py"),
    (keras, "src/backend/**/*.py"),
)


def dataset_class_names(tree):
    """Returns the private classes of datasets that a module compares names with."""
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return {text for text in strings if re.fullmatch(r"_[A-Z]\w*Dataset", str(text))}


def test_private_names_in_use_exist_in_the_installed_release():
    # A name that is read by getattr with a default, or compared with a string, fails silently.
    tree = ast.parse(pathlib.Path(private_api.__file__).read_text())
    attributes, _ = private_names(tree)
    names = attributes | dataset_class_names(tree)
    assert {"_seed", "_initial_epoch", "_DirectedInterleaveDataset"} <= names
    source = "".join(
        path.read_text()
        for module, pattern in DEFINING_FILES
        for path in pathlib.Path(module.__file__).parent.glob(pattern)
    )
    assert {name for name in names if not re.search(rf"\b{name}\b", source)} == set()


def test_private_names_of_others_are_used_in_one_module_only():
    modules = {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text())
        for path in PACKAGE.rglob("*.py")
    }
    used, _ = private_names(modules.pop("private_api.py"))
    assert {"_flatten_layers", "_seed", "_tensors"} <= used
    # It uses private names of argparse.
    modules.pop("commands/command_line.py")
    names = {module: private_names(tree) for module, tree in modules.items()}
    defined = set().union(*(module_defines for _, module_defines in names.values()))
    assert {
        module: used - defined - PYTHON_NAMES
        for module, (used, _) in names.items()
        if used - defined - PYTHON_NAMES
    } == {}


def test_private_modules_of_others_are_imported_in_one_module_only():
    for path in PACKAGE.rglob("*.py"):
        imports = re.findall(
            r"\b(?:from|import) (?:tensorflow\.python|keras\.src)\b", path.read_text()
        )
        assert path.name == "private_api.py" or not imports, path


def test_layer_numbers_from_continues_from_start_and_then_as_before():
    before = keras.layers.ReLU().name
    with private_api.layer_numbers_from({}) as numbers:
        assert [keras.layers.ReLU().name for _ in range(2)] == ["re_lu", "re_lu_1"]
    assert dict(numbers) == {"re_lu": 2}
    with private_api.layer_numbers_from(numbers):
        assert keras.layers.ReLU().name == "re_lu_2"
    assert dict(numbers) == {"re_lu": 2}
    number = int(before.removeprefix("re_lu").removeprefix("_") or 0)
    assert keras.layers.ReLU().name == f"re_lu_{number + 1}"


def test_flatten_layers_lists_the_model_and_its_layers():
    inner = small_model()
    outer = keras.Sequential([keras.Input((2,)), inner], name="outer")
    assert {outer, inner, inner.layers[0]} <= set(private_api.flatten_layers(outer))
    below = private_api.flatten_layers(outer, include_self=False)
    assert inner.layers[0] in below
    assert outer not in below


def test_set_initial_epoch_decides_where_fit_begins():
    model = small_model()
    begun = []
    model.compile("sgd", "mse")
    assert private_api.initial_epoch(model) is None

    class Resume(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            private_api.set_initial_epoch(model, 2)

        def on_epoch_begin(self, epoch, logs=None):
            begun.append(epoch)

    model.fit(np.ones((2, 2)), np.ones((2, 1)), epochs=4, verbose=0, callbacks=[Resume()])
    assert begun == [2, 3]
    assert private_api.initial_epoch(model) == 2


def test_loss_tracker_has_the_loss_of_fit():
    model = small_model()
    model.compile("sgd", "mse")
    history = model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    assert float(private_api.loss_tracker(model).result()) == pytest.approx(
        history.history["loss"][0]
    )


def test_producing_operation_of_an_output_is_its_layer():
    operation, number = private_api.producing_operation(small_model().outputs[0])
    assert (operation.name, number) == ("first", 0)


@pytest.mark.parametrize("kind", ["keras", "hi"])
def test_trainable_variables_returns_the_variables_passed_to_build(kind):
    optimizer = (
        keras.optimizers.SGD(0.5) if kind == "keras" else hybrid_imagenet.optimizers.SGD(0.5)
    )
    variables = [keras.Variable(np.ones(shape, np.float32), name="w") for shape in ((3,), (2, 2))]
    optimizer.build(variables)
    assert list(map(id, private_api.trainable_variables(optimizer))) == list(map(id, variables))


def test_learning_rate_variable_is_part_of_the_state():
    optimizer = keras.optimizers.SGD(0.5)
    variable = private_api.learning_rate_variable(optimizer)
    assert variable.numpy() == 0.5
    assert any(variable is other for other in optimizer.variables)


def test_wrap_tf_variable_shares_values_in_both_directions():
    ours = tf.Variable(np.ones(3, np.float32), name="w")
    shared = private_api.wrap_tf_variable(ours)
    shared.assign([2.0, 2.0, 2.0])
    assert ours.numpy().tolist() == [2.0] * 3
    ours.assign([3.0, 3.0, 3.0])
    assert shared.numpy().tolist() == [3.0] * 3


def test_wrap_tf_variable_has_the_constraint_of_the_variable():
    constraint = keras.constraints.NonNeg()
    ours = tf.Variable(np.ones(3, np.float32), constraint=constraint)
    assert private_api.wrap_tf_variable(ours).constraint is constraint
    assert private_api.wrap_tf_variable(tf.Variable([1.0])).constraint is None


def test_running_callbacks_has_all_callbacks_of_fit():
    callbacks = []

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            callbacks.extend(private_api.running_callbacks())

    other = keras.callbacks.EarlyStopping("loss")
    model = small_model()
    model.compile("sgd", "mse")
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0, callbacks=[Look(), other])
    assert any(callback is other for callback in callbacks)
    assert private_api.running_callbacks() == ()


def test_decays_is_false_for_excluded_variables():
    optimizer = keras.optimizers.SGD(0.1, weight_decay=0.1)
    kernel = keras.Variable(1.0, name="kernel")
    assert private_api.is_weight_decayed(optimizer, kernel)
    optimizer.exclude_from_weight_decay(var_names=["kernel"])
    assert not private_api.is_weight_decayed(optimizer, kernel)


def test_insert_callback_adds_one_for_later_events():
    events = []

    class Added(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            events.append("train begin")

        def on_epoch_end(self, epoch, logs=None):
            events.append("added")

    class Adding(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            private_api.insert_callback(Added(), len(private_api.running_callbacks()))

        def on_epoch_end(self, epoch, logs=None):
            events.append("adding")

    model = small_model()
    model.compile("sgd", "mse")
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0, callbacks=[Adding()])
    assert events == ["adding", "added"]
    private_api.insert_callback(Added(), 0)


def test_running_callback_list_is_found_from_an_inner_function():
    found = []

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.look()

        def look(self):
            found.append(private_api._running_callback_list())

    model = small_model()
    model.compile("sgd", "mse")
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0, callbacks=[Look()])
    assert isinstance(found[0], keras.callbacks.CallbackList)
    assert private_api._running_callback_list() is None


def test_blocking_modules_run_steps_and_fetch_values():
    execute, ops = private_api.blocking_modules()
    assert callable(execute.execute)
    assert hasattr(ops.EagerTensor, "numpy") or hasattr(ops, "_EagerTensorBase")


def test_eager_context_lists_devices():
    tf.constant(1.0)
    assert private_api.eager_context().devices()
    assert private_api.tensorflow_was_used()


def test_is_compiled_by_xla_depends_on_jit_compile():
    results = []

    def traced():
        results.append(private_api.is_compiled_by_xla())

    tf.function(traced, jit_compile=True, autograph=False)()
    tf.function(traced, autograph=False)()
    assert results == [True, False]


def test_is_op_determinism_enabled_is_false_by_default():
    assert private_api.is_op_determinism_enabled() is False


def test_dataset_seeds_returns_the_seeds_of_a_shuffle():
    tf.random.set_seed(None)
    numbers = tf.data.Dataset.range(4)
    assert private_api.dataset_seeds(numbers.shuffle(4)) == (0, 0)
    assert private_api.dataset_seeds(numbers.shuffle(4, seed=3))[1] == 3
    assert private_api.dataset_seeds(tf.data.Dataset.random(seed=5))[1] == 5
    assert private_api.dataset_seeds(numbers.map(lambda x: x)) is None
    renamed = type("_ShuffleDatasetOfARelease", (), {})()
    with pytest.raises(RuntimeError, match="_ShuffleDatasetOfARelease"):
        private_api.dataset_seeds(renamed)


def test_dataset_inputs_returns_all_datasets_that_a_dataset_combines():
    numbers = tf.data.Dataset.range(4)
    both = tf.data.Dataset.zip((numbers, numbers.batch(2).unbatch())).concatenate(
        tf.data.Dataset.zip(numbers, numbers)
    )
    assert len(private_api.dataset_inputs(both)) == 2
    assert sum(1 for part in private_api.walk_datasets(both) if "Range" in type(part).__name__) == 4


def test_dataset_graphs_have_the_operations_of_nested_datasets():
    nested = tf.data.Dataset.range(2).interleave(lambda i: tf.data.Dataset.range(3).shuffle(3))
    (graph,) = private_api.dataset_graphs(nested)
    assert "ShuffleDatasetV3" in [node.op for node in graph.node]


def test_dataset_captures_are_the_tensors_that_a_function_uses():
    table = tf.constant([5, 6, 7])
    dataset = tf.data.Dataset.range(3).map(lambda i: table[i])
    assert [tensor.numpy().tolist() for tensor in private_api.dataset_captures(dataset)] == [
        [5, 6, 7]
    ]


def test_dataset_tensors_returns_the_arrays_of_a_dataset():
    (tensor,) = private_api.dataset_tensors(tf.data.Dataset.from_tensor_slices([3, 1, 2]))
    assert tensor.numpy().tolist() == [3, 1, 2]
    assert private_api.dataset_tensors(tf.data.Dataset.from_tensors([3, 1, 2]))
    assert private_api.dataset_tensors(tf.data.Dataset.range(3)) == []


def test_running_fit_data_is_the_adapter_of_the_running_fit():
    assert private_api.running_fit_data() is None
    model = small_model()
    sizes = []
    model.compile("sgd", "mse")

    class Look(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            sizes.append(private_api.running_fit_data().batch_size)

    model.fit(np.ones((6, 2)), np.ones((6, 1)), batch_size=3, verbose=0, callbacks=[Look()])
    assert sizes == [3]


class DatasetOfTwo(keras.utils.PyDataset):
    """Two batches of one example, with the numbers of the batches."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.full((1, 2), index, np.float32), np.ones((1, 1), np.float32)


def batches_seen(replace, *data, **options):
    """Returns the first number of each batch of an epoch whose data a function replaces."""
    model = small_model()
    model.compile("sgd", "mse")
    seen = []
    steps = []

    class Look(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            assert private_api.running_epoch_iterator() is not None
            data = private_api.RunningFitData()
            dataset, num_batches = replace(data)
            data.set_epoch(dataset, num_batches)
            seen.extend(float(x[0, 0]) for x, y in dataset.as_numpy_iterator())

        def on_train_batch_end(self, batch, logs=None):
            steps.append(batch)

    model.fit(*data, verbose=0, callbacks=[Look()], **options)
    assert len(steps) == len(seen)
    return seen


def test_running_fit_data_of_arrays_uses_another_shuffle_and_fewer_batches():
    assert private_api.running_epoch_iterator() is None
    x = np.arange(8, dtype=np.float32).reshape(4, 2)

    def reverse(data):
        assert data.are_arrays
        assert data.are_shuffled
        assert data.py_dataset is None
        assert (data.num_batches, data.continues_over_epochs) == (4, False)
        dataset = data.array_dataset(lambda indices: tf.reverse(indices, [0]))
        return dataset.skip(1), 3

    assert batches_seen(reverse, x, np.ones((4, 1)), batch_size=1) == [4.0, 2.0, 0.0]


def test_running_fit_data_of_a_py_dataset_can_be_replaced():
    class Backwards(DatasetOfTwo):
        def __getitem__(self, index):
            return super().__getitem__(1 - index)

    def replace(data):
        assert not data.are_arrays
        assert isinstance(data.py_dataset, DatasetOfTwo)
        assert data.are_shuffled
        data.replace_py_dataset(Backwards())
        assert not data.are_shuffled
        return data.dataset, 2

    assert batches_seen(replace, DatasetOfTwo()) == [1.0, 0.0]


def test_metrics_by_owner_has_all_metrics_before_and_after_the_first_step():
    model = small_model()
    model.own = keras.metrics.Mean(name="own")
    model.compile("sgd", "mse", metrics=["mae"])
    names = {
        owner: [metric.name for metric in metrics]
        for owner, metrics in private_api.metrics_by_owner(model).items()
    }
    assert names == {
        "loss": ["loss"],
        "compiled": ["compile_metrics"],
        "losses": [],
        "own": ["own"],
    }
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    (compiled,) = private_api.metrics_by_owner(model)["compiled"]
    assert [metric.name for metric in compiled.metrics] == ["mae"]


def test_global_seed_is_that_of_set_random_seed():
    keras.utils.set_random_seed(5)
    assert private_api.global_seed() == 5


def test_dataset_batch_size_is_found_through_steps_that_keep_it():
    numbers = tf.data.Dataset.range(10)
    partial = numbers.batch(4)
    assert private_api.dataset_batch_size(numbers.batch(4, drop_remainder=True)) == 4
    kept = partial.map(lambda x: (x, x)).shuffle(2).repeat(2).take(3).prefetch(1)
    assert private_api.dataset_batch_size(kept) == 4
    parallel = numbers.batch(4, num_parallel_calls=2).map(lambda x: x, num_parallel_calls=2)
    assert private_api.dataset_batch_size(parallel) == 4
    assert private_api.dataset_batch_size(partial.unbatch()) is None
    assert private_api.dataset_batch_size(partial.unbatch().batch(3)) == 3
    ragged = tf.data.Dataset.from_generator(
        lambda: iter([[1.0]]), output_signature=tf.TensorSpec([None])
    )
    assert private_api.dataset_batch_size(ragged) is None


def test_dataset_chooses_inputs_is_true_for_samples_of_several_datasets():
    numbers = tf.data.Dataset.range(4)
    assert private_api.dataset_chooses_inputs(
        tf.data.Dataset.sample_from_datasets([numbers, numbers], [0.5, 0.5])
    )
    assert not private_api.dataset_chooses_inputs(numbers)


def test_dataset_is_nondeterministic_only_if_requested():
    numbers = tf.data.Dataset.range(4)
    assert private_api.dataset_is_nondeterministic(
        numbers.map(lambda x: x, num_parallel_calls=2, deterministic=False)
    )
    assert not private_api.dataset_is_nondeterministic(
        numbers.map(lambda x: x, num_parallel_calls=2)
    )
    options = tf.data.Options()
    options.deterministic = False
    assert private_api.dataset_is_nondeterministic(numbers.with_options(options))
