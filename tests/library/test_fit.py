"""`compile` and `fit` with the library's optimizer and callbacks: errors, logs and records."""

import socket
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import hybrid_imagenet as hi
from hybrid_imagenet.comm import process
from hybrid_imagenet.errors import UserError
from tests.library import models, programs
from tests.library.published import Distiller
from tests.training.programs import cluster_2_step


def test_fit_overflow_on_one_rank_skips_the_step_on_both(pools):
    results = pools[2].call(programs.overflow)
    assert results[0]["seen"] == results[1]["seen"]
    first, second, third = results[0]["seen"]
    assert not results[0]["wrapped"]
    assert [first[0], second[0], third[0]] == [2.0**15, 2.0**14, 2.0**14]
    assert [first[1], second[1], third[1]] == [0, 1, 1]
    assert first[2] == second[2] != third[2]


def test_mixed_float16_sends_fp16_in_fit_and_in_the_program(pools):
    for result in pools[2].call(programs.overflow):
        assert result["wire"] == ["float16"]
    for result in pools[2].call(cluster_2_step, 1.0, 1, "--precision=mixed_float16"):
        assert result["types"] == ["mixed_float16", "float16"]


def test_fit_on_a_gpu_compiles_the_step_up_to_the_gradients_with_xla(pools):
    for result in pools[2].call(programs.operations_outside_xla):
        assert result["jit"]
        # The update is traced once, outside the part that XLA compiles.
        assert result["traced"] == [[[6, 5], [5], [5, 3], [3]]]


def test_fit_errors_are_the_same_line_on_all_ranks(pools):
    first, second = pools[2].call(programs.rejections)
    failed = f"on {socket.gethostname()} failed: RuntimeError: of this rank\n"
    failed += "RuntimeError: of this rank\n"
    assert first.pop("uncaught") == f"error: of all ranks\nrank 0 {failed}"
    assert second.pop("uncaught") == f"rank 1 {failed}"
    codes = first.pop("codes")
    # The hook ends the process. Here `os._exit` returns, so a code may follow a second time.
    assert list(dict.fromkeys(codes)) == [3, 1]
    assert second.pop("codes") == codes
    assert first == second
    assert first["broadcast"].startswith("before the first step the ranks differ in weights (")
    assert first["steps"].startswith(
        "the ranks have different numbers of steps per epoch (4, 3), and some would wait"
    )
    assert first["unbuilt layer"].startswith("The first step created weights (sequential")
    assert first["unbuilt layer"].endswith("or call them on one batch before fit.")
    assert first["layer loss"].startswith("The layer 'add_loss' adds a loss of the shape (4,)")
    assert first["xla"].startswith("XLA compiles this training step")
    assert first["settings"].startswith(
        "allreduce=ring, fusion_threshold_mb=4 conflict with the settings that are already in use,"
        " allreduce=ring, fusion_threshold_mb=16"
    )
    assert not any("\n" in line for line in first.values())


def test_large_gradients_of_a_float32_loop_on_ranks_skip_no_step(pools):
    for result in pools[2].call(programs.large_gradients):
        assert result["scale"] == 1.0
        assert result["skipped"] == 0
        np.testing.assert_allclose(result["weights"], [0.7] * 4, rtol=1e-3)


def test_first_step_of_a_loop_without_broadcast_model_warns_once_on_rank_zero(pools):
    (warning,), on_other_rank = pools[2].call(programs.first_step_of_loop, False)
    assert warning.startswith(
        "the weights of all ranks are equal at the first step, but no rank has sent them"
    )
    assert "Call hybrid_imagenet.broadcast_model(model) on every rank" in warning
    assert on_other_rank == []


def test_first_step_after_a_broadcast_warns_of_nothing(pools):
    assert pools[2].call(programs.first_step_of_loop, True) == [[], []]
    assert pools[2].call(programs.first_step_of_fit) == [[], []]


def test_fit_logs_and_statistics_cover_the_examples_of_all_ranks(pools):
    results = pools[2].call(programs.logs_and_statistics)
    logs = results[0]["logs"]
    assert logs == results[1]["logs"]
    for name in ("accuracy", "sparse_top_k_categorical_accuracy", "loss"):
        for values, key in (("metrics", name), ("evaluated", f"val_{name}")):
            parts = [(result[values][0][name], result[values][1]) for result in results]
            mean = sum(value * count for value, count in parts) / sum(count for _, count in parts)
            assert logs[key][-1] == pytest.approx(mean, rel=1e-6), key
        assert results[0]["average"][name] == results[1]["average"][name]
        assert results[0]["average"][name] == pytest.approx(logs[f"val_{name}"][-1], rel=1e-6)
    statistics = [np.array(result["own"][-1]) for result in results]
    # Both ranks have equally many examples. The variance follows from the law of total variance.
    mean = (statistics[0][0] + statistics[1][0]) / 2
    variance = (statistics[0][1] + statistics[1][1]) / 2 + (
        (statistics[0][0] - statistics[1][0]) / 2
    ) ** 2
    for result in results:
        np.testing.assert_allclose(result["merged"], [mean, variance], rtol=1e-5, atol=1e-7)
        # Linear from 0 to 0.5 in the three steps of the first epoch, then a square down to 0 at the
        # end of the second.
        expected = [0, 0.5 / 3, 1 / 3, 0.5, 0.5 * (2 / 3) ** 2, 0.5 * (1 / 3) ** 2]
        np.testing.assert_allclose(result["rates"], expected, rtol=1e-6)
        np.testing.assert_allclose(
            result["logs"]["learning_rate"], [expected[2], expected[5]], rtol=1e-6
        )


def test_distributed_optimizer_unsupported_arguments_are_rejected():
    def error(inner, **arguments):
        with pytest.raises((UserError, ValueError)) as caught:
            hi.DistributedOptimizer(inner, **arguments)
        return str(caught.value)

    assert "scales the loss, which DistributedOptimizer does itself" in error(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    )
    assert "loss_scale_factor=8" in error(keras.optimizers.SGD(loss_scale_factor=8.0))
    assert error("sgd", loss_scale="much").startswith("loss_scale=much is not supported")
    assert error("sgd", allreduce="star").startswith("allreduce=star: choose one of ring")
    assert error("sgd", gradient_accumulation_steps=1).startswith(
        "gradient_accumulation_steps=1 is not supported. Use a whole number"
    )
    assert error("sgd", torus_grid="1x1").startswith(
        "torus_grid: there is no such option with allreduce=ring"
    )
    keras_own = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    assert "one of hybrid_imagenet.schedules" in error("sgd", schedule=keras_own)
    used = keras.optimizers.SGD()
    used.build([keras.Variable(1.0)])
    assert "used already" in error(used)
    with pytest.raises(
        ValueError, match=r"Pass a number, and a schedule of hybrid_imagenet.schedules to Distr"
    ):
        hi.optimizers.LARS(keras_own)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("backward_passes_per_step", 4, "Use gradient_accumulation_steps, which averages"),
        ("op", "Average", "Omit it: gradients are always averaged"),
        ("groups", 2, "packed into buckets of fusion_threshold_mb"),
        ("clipnorm", 1.0, r"DistributedOptimizer(keras.optimizers.SGD(clipnorm=...))"),
        ("fusion_threshold", 2, "(did you mean fusion_threshold_mb?)"),
        ("color", "red", "Its arguments are compression, allreduce, loss_scale"),
    ],
)
def test_distributed_optimizer_unknown_argument_is_answered_with_the_right_one(name, value, remedy):
    with pytest.raises(UserError, match=f"DistributedOptimizer has no argument {name}") as caught:
        hi.DistributedOptimizer("sgd", **{name: value})
    assert remedy in str(caught.value)


@pytest.mark.parametrize("arguments", [{}, {"inner_optimizer": "sgd"}])
def test_distributed_optimizer_without_an_inner_optimizer_is_rejected_by_name(arguments):
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'inner'"):
        hi.DistributedOptimizer(**arguments)


def test_distributed_optimizer_compression_class_is_answered_with_the_names():
    class FP16Compressor:
        pass

    with pytest.raises(UserError, match=r"is not supported\. Use one of 'auto', 'none', 'fp16'"):
        hi.DistributedOptimizer("sgd", compression=FP16Compressor)


def test_optimizer_variable_without_gradient_is_named():
    variable, unused = (
        keras.Variable(np.ones(3, np.float32), name=name) for name in ("w", "unused")
    )
    optimizer = hi.DistributedOptimizer("sgd")
    with pytest.raises(
        ValueError,
        match=r"no gradient for unused, because .* Set trainable=False",
    ):
        optimizer.apply([tf.ones([3]), None], [variable, unused])
    with pytest.raises(ValueError, match="Compute the loss inside the GradientTape"):
        optimizer.apply([None, None])


def test_optimizer_other_variables_than_it_was_built_on_are_rejected():
    optimizer = hi.DistributedOptimizer("sgd")
    optimizer.apply([tf.ones([3])], [keras.Variable(np.ones(3, np.float32))])
    with pytest.raises(ValueError, match="compile the model with a new optimizer"):
        optimizer.apply([tf.ones([3])], [keras.Variable(np.ones(3, np.float32))])


def test_optimizer_unscaled_loss_of_a_model_in_fp16_is_rejected():
    variable = keras.Variable(np.ones(3, np.float32))
    optimizer = hi.DistributedOptimizer("sgd")
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with pytest.raises(UserError, match="a loss that was not scaled"):
            optimizer.apply([tf.ones([3])], [variable])
    finally:
        keras.config.set_dtype_policy("float32")


def test_optimizer_unscaled_loss_of_an_attached_fp16_model_is_rejected():
    """Calls `apply` under another global policy: only the policy of the model counts."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, dtype="mixed_float16")])
    optimizer = hi.DistributedOptimizer(hi.optimizers.SGD(0.1))
    optimizer.attach(model)
    gradients = [tf.ones(v.shape) for v in model.trainable_variables]
    with pytest.raises(UserError, match="a loss that was not scaled"):
        optimizer.apply(gradients, model.trainable_variables)


def test_optimizer_unscaled_loss_after_a_scaled_one_is_rejected():
    variable = keras.Variable(np.ones(3, np.float32))
    optimizer = hi.DistributedOptimizer("sgd", loss_scale=8)
    optimizer.scale_loss(tf.constant(1.0))
    optimizer.apply([tf.ones([3])], [variable])
    with pytest.raises(UserError, match="a loss that was not scaled"):
        optimizer.apply([tf.ones([3])])


def take_two_steps(inner, **settings):
    variable = keras.Variable(np.ones(3, np.float32), name="w")
    optimizer = hi.DistributedOptimizer(inner, loss_scale=1, **settings)
    optimizer.apply([tf.constant([1.0, 2.0, 3.0])], [variable])
    optimizer.apply([tf.constant([1.0, 0.0, 3.0])], [variable])
    return optimizer, variable


@pytest.mark.parametrize("kind", ["keras", "hi"])
def test_set_weights_continues_the_state_of_another_optimizer(kind):
    make = (
        (lambda: keras.optimizers.Adam(0.1))
        if kind == "keras"
        else (lambda: hi.optimizers.LAMB(0.1))
    )
    first, variable = take_two_steps(make())
    other = hi.DistributedOptimizer(make(), loss_scale=1)
    with pytest.raises(ValueError, match="call build"):
        other.set_weights(first.variables)
    other.build([variable])
    other.set_weights(first.variables)
    assert int(other.iterations) == 2
    for loaded, saved in zip(other.variables, first.variables, strict=True):
        np.testing.assert_array_equal(loaded.numpy(), saved.numpy())
    other.set_weights([v.numpy() for v in first.variables])
    with pytest.raises(ValueError, match="do not fit the"):
        other.set_weights(first.variables[:-1])


@pytest.mark.parametrize("kind", ["keras", "hi"])
def test_apply_gradients_updates_a_tensorflow_variable_like_a_keras_one(kind):
    make = (
        (lambda: keras.optimizers.Adam(0.1))
        if kind == "keras"
        else (lambda: hi.optimizers.LAMB(0.1))
    )
    _, expected = take_two_steps(make())
    optimizer = hi.DistributedOptimizer(make(), loss_scale=1)
    variable = tf.Variable(np.ones(3, np.float32), name="w")

    @tf.function
    def step(gradient):
        optimizer.apply_gradients([(gradient, variable)])

    step(tf.constant([1.0, 2.0, 3.0]))
    step(tf.constant([1.0, 0.0, 3.0]))
    np.testing.assert_allclose(variable.numpy(), expected.numpy(), rtol=1e-6)


def test_loss_of_several_values_on_several_ranks_is_rejected():
    optimizer = hi.DistributedOptimizer("sgd")
    vector = tf.ones([4])
    with mock.patch.object(process, "size", lambda: 2):
        for loss in (vector, vector[:, None]):
            with pytest.raises(
                UserError, match=r"The loss has the shape \(4,.*Use the mean: tf.reduce_mean"
            ):
                optimizer.scale_loss(loss)
        model = models.compiled(hi.DistributedOptimizer("sgd"))
        model.compile(
            hi.DistributedOptimizer("sgd"), keras.losses.MeanSquaredError(reduction="none")
        )
        with pytest.raises(UserError, match=r"The loss has the shape"):
            model.train_on_batch(np.ones((4, 6)), np.ones((4, 3)))
        optimizer.scale_loss(tf.constant(1.0))
        optimizer.scale_loss(tf.ones([1, 1]))
    assert optimizer.scale_loss(vector).shape == [4]


def test_distributed_optimizers_get_different_names():
    names = {hi.DistributedOptimizer("sgd").name for _ in range(2)}
    assert len(names) == 2
    assert hi.DistributedOptimizer("sgd", name="mine").name == "mine"


def test_distributed_optimizer_reads_and_sets_arguments_of_its_inner_optimizer():
    optimizer = hi.DistributedOptimizer(
        keras.optimizers.SGD(1.0, clipnorm=1.0, weight_decay=0.1, use_ema=True)
    )
    assert (optimizer.clipnorm, optimizer.weight_decay, optimizer.clipvalue) == (1.0, 0.1, None)
    optimizer.clipnorm = 2.0
    assert optimizer.inner.clipnorm == 2.0
    optimizer.build([keras.Variable(np.ones(3, np.float32))])
    assert sum("average" in v.name for v in optimizer.variables) == 1


def test_exclude_from_weight_decay_of_the_wrapper_reaches_the_inner_optimizer():
    weight = keras.Variable([1.0], name="kernel")
    optimizer = hi.DistributedOptimizer(keras.optimizers.AdamW(0.1, weight_decay=0.5), loss_scale=1)
    with pytest.raises(UserError, match="got no variables at its first call"):
        optimizer.apply([tf.zeros(1)])
    optimizer.exclude_from_weight_decay(var_names=["kernel"])
    optimizer.apply([tf.zeros(1)], [weight])
    assert weight.numpy() == 1


def test_broadcast_model_copies_the_adapted_normalization_of_rank_0():
    norm = keras.layers.Normalization()
    norm.adapt(np.array([[1.0], [3.0]], np.float32))
    model = keras.Sequential([keras.Input((1,)), norm, keras.layers.Dense(1)])
    # A broadcast would assign the value of rank 0 like this.
    norm.adapt_mean.assign([5.0])
    hi.broadcast_model(model)
    assert norm(np.float32([[5.0]])).numpy() == 0


def test_shard_gives_every_rank_equally_many_elements():
    arrays = (np.arange(11), {"y": np.arange(11) * 2})
    shares = [hi.data.shard(arrays, rank, 3) for rank in range(3)]
    assert [s[0].tolist() for s in shares] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert shares[1][1]["y"].tolist() == [2, 8, 14]
    sized = tf.data.Dataset.from_tensor_slices((np.arange(11), np.arange(11) * 2))
    unsized = sized.filter(lambda x, y: x >= 0)
    for dataset in (sized, unsized, unsized.map(lambda x, y: x)):
        first_elements = [
            [int(np.ravel(e)[0]) for e in hi.data.shard(dataset, rank, 3).as_numpy_iterator()]
            for rank in range(3)
        ]
        assert first_elements == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    # A tuple of one component stays one.
    singles = tf.data.Dataset.from_tensor_slices((np.arange(6),)).filter(lambda x: x >= 0)
    assert hi.data.shard(singles, 1, 3).element_spec == singles.element_spec
    sizes = [
        hi.data.shard(sized, rank, 3, remainder="keep").cardinality().numpy() for rank in range(3)
    ]
    assert sizes == [4, 4, 3]
    with pytest.raises(UserError, match="2 elements for 3 ranks"):
        hi.data.shard(np.arange(2), 0, 3)
    # Another test of this process may have set a seed.
    tf.random.set_seed(None)
    shuffled = tf.data.Dataset.range(8).shuffle(8).map(lambda x: x).prefetch(1)
    with pytest.raises(
        UserError, match="shuffles without a seed, so its order differs on each rank"
    ):
        hi.data.shard(shuffled, 0, 2)
    assert hi.data.shard(tf.data.Dataset.range(8).shuffle(8, seed=1), 0, 2).cardinality() == 4
    with pytest.raises(UserError, match="arrays of different lengths"):
        hi.data.shard((np.arange(4), np.arange(5)), 0, 2)


def test_shard_of_unsupported_data_is_rejected_with_a_remedy():
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return np.zeros((2, 3))

    for data, remedy in (
        ([1, 2, 3], r"numpy\.asarray"),
        (["a.jpg", "bb.jpg"], r"numpy\.asarray"),
        ((x for x in range(4)), "PyDataset on each rank"),
        (Batches(), "PyDataset on each rank"),
    ):
        with pytest.raises(UserError, match=remedy):
            hi.data.shard(data, 0, 2)


def test_apply_gradient_of_unknown_shape_gets_the_shape_of_its_variable():
    variable = keras.Variable(np.ones(3, np.float32), name="w")
    optimizer = hi.DistributedOptimizer(keras.optimizers.SGD(0.5), loss_scale=1)

    @tf.function
    def step():
        optimizer.apply(
            [tf.raw_ops.PlaceholderWithDefault(input=tf.ones([3]), shape=tf.TensorShape(None))],
            [variable],
        )

    step()
    assert variable.numpy().tolist() == [0.5] * 3


def test_model_without_weights_is_rejected_on_several_ranks_only(tmp_path):
    class Chain(keras.Model):
        def __init__(self, *parts):
            super().__init__()
            self.parts = parts

        def call(self, x):
            for part in self.parts:
                x = part(x)
            return x

    x = np.zeros((2, 6), np.float32)
    two = mock.Mock(
        size=2, rank=0, broadcast_object=lambda v: v, allgather_object=lambda v: [v] * 2
    )
    for parts in ([keras.layers.Dense(3)], [models.plain(3), keras.layers.Dense(3)]):
        model = Chain(*parts)
        model.compile(hi.DistributedOptimizer("sgd"), "mse")
        with pytest.raises(UserError, match="call it on one batch before fit"):
            hi.broadcast_model(model, two)
        with pytest.raises(UserError, match="call it on one batch before fit"):
            model.fit(x, x[:, :3], verbose=0, callbacks=[hi.callbacks.Checkpoint(tmp_path / "c")])
        model.fit(x, x[:, :3], verbose=0, callbacks=hi.callbacks.default_callbacks())
        assert int(model.optimizer.iterations) == 1
        hi.broadcast_model(model, two)
    # This model was never called either, but all its weights exist.
    built = Chain(models.plain(3))
    built.compile(hi.DistributedOptimizer("sgd"), "mse")
    built.fit(x, x[:, :3], verbose=0, callbacks=hi.callbacks.default_callbacks())


def test_fit_of_a_model_in_the_scope_of_a_mirrored_strategy_is_rejected():
    x, y = models.data(1)

    def fit(strategy):
        with strategy.scope():
            model = models.compiled(hi.DistributedOptimizer("sgd"))
            model.fit(x, y, models.BATCH, verbose=0, callbacks=hi.callbacks.default_callbacks())

    fit(tf.distribute.OneDeviceStrategy("/cpu:0"))
    with pytest.raises(UserError, match=r"the scope of tf.distribute.MirroredStrategy, .* Remove"):
        fit(tf.distribute.MirroredStrategy(["/cpu:0"]))


def test_kinds_of_a_model_that_its_first_step_builds_include_the_bias():
    model = keras.Sequential([keras.layers.GRU(3)])
    model.compile(hi.DistributedOptimizer(hi.optimizers.LARS(0.1)), "mse")
    model.fit(
        np.ones((2, 4, 2)), np.ones((2, 3)), verbose=0, callbacks=hi.callbacks.default_callbacks()
    )
    assert [kind.value for kind in model.optimizer.inner.kinds] == ["kernel", "kernel", "bias"]


def test_random_layers_differ_between_ranks_and_repeat_in_each_run(pools):
    first, second = pools[2].call(programs.random_layers)
    for draws, other_draws in zip(first["draws"], second["draws"], strict=True):
        for values, other_values in zip(draws, other_draws, strict=True):
            assert values != other_values
    assert first["is_reproducible"]
    assert second["is_reproducible"]
    assert first["weights"] == second["weights"]


def test_kinds_of_variables_follow_from_layers_if_a_step_trains_only_some():
    norm = keras.Sequential(
        [keras.Input((4,)), keras.layers.LayerNormalization(), keras.layers.Dense(2)]
    )
    model = Distiller(models.plain(3), norm)
    optimizer = hi.DistributedOptimizer(hi.optimizers.LARS(trust_coefficient=0.01), loss_scale=1)
    optimizer.attach(model)
    assert not optimizer.built
    optimizer.apply([tf.zeros(v.shape) for v in norm.trainable_variables], norm.trainable_variables)
    assert [kind.value for kind in optimizer.inner.kinds] == [
        "norm_scale",
        "norm_offset",
        "kernel",
        "bias",
    ]


def test_vector_metrics_cover_all_examples_and_are_equal_on_all_ranks(pools):
    first, second = pools[2].call(programs.vectors)
    history = first["history"]
    assert history == second["history"]
    predicted, targets = (
        np.concatenate([first["predicted"][i], second["predicted"][i]]) for i in (0, 1)
    )
    predicted_class = predicted == predicted.max(1, keepdims=True)
    f1 = (
        2
        * (predicted_class * targets).sum(0)
        / np.maximum(predicted_class.sum(0) + targets.sum(0), 1)
    )
    np.testing.assert_allclose(history["val_f1"][-1], f1, rtol=1e-5)
    largest = (np.max(first["predicted"][0], 0) + np.max(second["predicted"][0], 0)) / 2
    np.testing.assert_allclose(history["val_largest"][-1], largest, rtol=1e-5)
    (line,) = first["warnings"]
    assert line.startswith("The metric largest is averaged over ranks with equal weight")
    assert second["warnings"] == []


@pytest.mark.slow
def test_two_optimizers_of_a_model_are_scheduled_saved_and_restored(pools, tmp_path):
    first, second = pools[2].call(programs.two_optimizers, str(tmp_path))
    # This includes statistics of normalization and sums of an accumulation.
    assert first == second
    assert first["whole"]["rates"] == pytest.approx(
        [0.5 * (1 - step / 16) ** 2 for step in (3, 7, 11, 15)]
    )
    for name in ("weights", "state"):
        for resumed, expected in zip(first["again"][name], first["whole"][name], strict=True):
            np.testing.assert_allclose(resumed, expected, rtol=1e-6, atol=1e-7)


def test_schedule_with_another_callback_that_sets_the_learning_rate_is_rejected(caplog):
    def fit(*callbacks, epochs=3):
        optimizer = hi.DistributedOptimizer("sgd", schedule=hi.schedules.polynomial(0.5, 3))
        model = models.compiled(optimizer, run_eagerly=True)
        x, y = models.data(1)
        return model.fit(
            x, y, models.BATCH, epochs, 0, [*hi.callbacks.default_callbacks(), *callbacks]
        )

    fit()
    assert not caplog.records
    fit(epochs=4)
    assert "the schedule's learning rate is 0 before epoch 4, the last one, ends" in caplog.text
    with pytest.raises(UserError, match="LearningRateScheduler"):
        fit(keras.callbacks.LearningRateScheduler(lambda epoch: 0.1))
    later = keras.callbacks.Callback()
    later.on_epoch_end = lambda epoch, logs=None: setattr(
        later.model.optimizer, "learning_rate", 0.2
    )
    with pytest.raises(UserError, match=r"is 0\.2, but the schedule has set"):
        fit(later)


def test_fit_accumulation_continues_from_the_counter_of_the_optimizer():
    """The host chooses between adding and updating with its own counter, which must agree."""

    def train(callbacks):
        keras.utils.set_random_seed(0)
        optimizer = hi.DistributedOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9), gradient_accumulation_steps=3
        )
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(optimizer, "mse")
        x = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
        updates = []
        # Four, two and five micro-batches: the second and third fit begin within an update.
        for first, last in ((0, 8), (8, 12), (12, 22)):
            model.fit(x[first:last], x[first:last, :2], 2, verbose=0, callbacks=callbacks())
            updates.append(int(optimizer.iterations))
        return updates, model.get_weights()

    chosen_by_host, weights = train(hi.callbacks.default_callbacks)
    branch, expected = train(list)
    assert chosen_by_host == branch == [1, 2, 3]
    for value, other in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(value, other)


@pytest.mark.parametrize("callbacks", [hi.callbacks.default_callbacks, list])
def test_fit_accumulation_continues_over_the_end_of_data_of_unknown_length(callbacks):
    """At the end of such data Keras begins one more step, which must leave the sums as they are.

    Each gradient is 1 and the rate is 1, so each update is -1. Without default callbacks there is a
    branch in the graph, as in a `train_step` of the user's.
    """
    optimizer = hi.DistributedOptimizer(keras.optimizers.SGD(1.0), gradient_accumulation_steps=2)
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(optimizer, lambda label, score: score)
    ones = np.ones((5, 4, 1), np.float32)
    data = tf.data.Dataset.from_tensor_slices((ones, ones)).filter(lambda image, label: True)
    seen = []
    for _ in range(4):
        model.fit(data, epochs=1, verbose=0, callbacks=callbacks())
        count = optimizer.micro_batches.read()
        seen.append((count, int(optimizer.iterations), layer.kernel.numpy().item()))
    assert seen == [(5, 2, -2.0), (10, 5, -5.0), (15, 7, -7.0), (20, 10, -10.0)]
