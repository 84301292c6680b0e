"""Optimizers of this package follow what Keras's own follow: constraints, exclusions, averages."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

import hybrid_imagenet as hi
from hybrid_imagenet.callbacks.batch_norm_statistics import BatchNormStatistics
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.optimizers.hyperparameters import StepHyperparameters
from tests.library import models, saving


def compiled(optimizer, **layer):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, **layer)])
    model.compile(optimizer, models.loss(), run_eagerly=True)
    return model


def distributed_sgd(packed):
    return hi.DistributedOptimizer(hi.optimizers.SGD(0.5, momentum=0.9), packed=packed)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: distributed_sgd(packed=False),
        lambda: distributed_sgd(packed=True),
        lambda: hi.optimizers.SGD(0.5, momentum=0.9),
    ],
    ids=["per variable", "packed", "not distributed"],
)
def test_optimizer_applies_constraints_like_that_of_keras(optimizer):
    constraint = keras.constraints.MaxNorm(0.5)
    ours = compiled(optimizer(), kernel_constraint=constraint)
    reference = compiled(keras.optimizers.SGD(0.5, momentum=0.9), kernel_constraint=constraint)
    x, y = models.data(1)
    saving.fit(ours, 2)
    reference.fit(x, y, models.BATCH, 2, 0, shuffle=False)
    for weight, expected in zip(ours.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-4, atol=1e-5)
    assert np.linalg.norm(ours.get_weights()[0], axis=0).max() <= 0.5 + 1e-5


def test_excluded_variables_do_not_decay():
    decays = []
    for excluded in ([], ["kernel"]):
        inner = hi.optimizers.AdamW(0.1, weight_decay=0.5)
        optimizer = hi.DistributedOptimizer(inner)
        optimizer.exclude_from_weight_decay(var_names=excluded)
        model = compiled(optimizer)
        optimizer.build(model.trainable_variables)
        decays.append(inner.decayed_indices())
    assert decays == [[0], []]


@pytest.mark.parametrize("name", ["weight_decay", "clipnorm", "clipvalue"])
def test_argument_that_would_have_no_effect_is_rejected(name):
    optimizer = hi.DistributedOptimizer(hi.optimizers.SGD(0.1))
    with pytest.raises(UserError, match=f"{name} of SGD cannot be set afterwards"):
        setattr(optimizer, name, 0.3)


def test_average_of_an_optimizer_of_keras_is_rejected():
    average = hi.optimizers.WeightAverage(0.9)
    with pytest.raises(UserError, match=r"AdamW is one of Keras\. Pass use_ema=True"):
        hi.DistributedOptimizer(keras.optimizers.AdamW(0.1), average=average)


def test_swap_of_an_average_that_no_optimizer_updates_is_rejected():
    model = compiled(hi.DistributedOptimizer(hi.optimizers.SGD(0.1)))
    swap = hi.callbacks.SwapAveragedWeights(hi.optimizers.WeightAverage(0.9))
    with pytest.raises(UserError, match="No optimizer of the model updates the average"):
        saving.fit(model, 1, more=[swap])


def averaging(average):
    return hi.DistributedOptimizer(hi.optimizers.SGD(0.1), average=average)


def test_average_of_layers_with_equal_names_is_updated():
    def tower(name):
        inputs = keras.Input((6,))
        return keras.Model(inputs, keras.layers.Dense(3, name="fc")(inputs), name=name)

    inputs = keras.Input((6,))
    outputs = keras.layers.Add()([tower("one")(inputs), tower("two")(inputs)])
    model = keras.Model(inputs, outputs)
    average = hi.optimizers.WeightAverage(0.5)
    model.compile(averaging(average), models.loss(), run_eagerly=True)
    swap = hi.callbacks.SwapAveragedWeights(average)
    saving.fit(model, 1, more=[swap])
    assert len(swap.variables()) == 4
    for value, weight in zip(average.variables, model.trainable_variables, strict=True):
        assert not np.array_equal(value.numpy(), weight.numpy())


def test_average_that_is_used_again_swaps_the_new_weights():
    average = hi.optimizers.WeightAverage(0.5)
    for _ in range(2):
        model = compiled(averaging(average))
        saving.fit(model, 1)
        trained = model.get_weights()
        average.exchange()
        swapped = model.get_weights()
        average.exchange()
        assert not np.array_equal(swapped[0], trained[0])
        np.testing.assert_array_equal(model.get_weights()[0], trained[0])


def test_fit_after_an_interrupted_validation_continues_with_the_trained_weights():
    average = hi.optimizers.WeightAverage(0.5)
    model = compiled(averaging(average))
    swap = hi.callbacks.SwapAveragedWeights(average)
    saving.fit(model, 1, more=[swap])
    trained = model.get_weights()
    swap.on_test_begin()
    assert not np.array_equal(model.get_weights()[0], trained[0])
    begun = []

    def look(logs):
        begun.append(model.get_weights())

    looking = keras.callbacks.LambdaCallback(on_train_begin=look)
    saving.fit(model, 2, begin=1, more=[swap, looking])
    np.testing.assert_array_equal(begun[0][0], trained[0])


class TwoEqualRanks:
    """Stands for a communicator of two ranks with equal values."""

    size = 2

    def allreduce_sum(self, values, name):
        return 2 * values


def test_statistics_with_a_large_mean_keep_their_variance():
    mean, variance = keras.Variable([10_000.0]), keras.Variable([1.0])
    pairs = [(mean, variance)]
    BatchNormStatistics(TwoEqualRanks(), pairs, dtype=tf.float64).synchronize()
    assert float(variance.numpy()[0]) == pytest.approx(1.0, rel=1e-6)
    assert mean.numpy()[0] == 10_000.0


def test_backup_and_restore_builds_the_optimizer_by_the_layers_of_the_model(tmp_path):
    def fit(epochs):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((2, 3))
        outputs = keras.layers.MultiHeadAttention(2, 3)(inputs, inputs)
        model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(outputs)))
        model.compile(
            hi.DistributedOptimizer(hi.optimizers.AdamW(1e-3)), models.loss(), run_eagerly=True
        )
        x, y = models.data(1)
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
        callbacks = hi.callbacks.default_callbacks(backup)
        model.fit(x.reshape(-1, 2, 3), y, 4, epochs, 0, callbacks, shuffle=False)
        return model

    fit(1)
    assert int(fit(2).optimizer.iterations) == 2 * models.STEPS


def test_evaluate_accepts_the_arguments_of_keras():
    model = compiled(hi.DistributedOptimizer(hi.optimizers.SGD(0.1)))
    x, y = models.data(1)
    results = hi.evaluate(
        model, x, y, verbose=0, return_dict=False, callbacks=keras.callbacks.Callback()
    )
    assert set(results) == {"loss"}


@pytest.mark.parametrize("saved_with", [None, "adam"])
def test_load_weights_of_a_model_without_a_distributed_optimizer(tmp_path, saved_with):
    source = compiled(saved_with) if saved_with else models.plain(7)
    if saved_with:
        source.fit(*models.data(1), models.BATCH, 1, 0)
    source.save_weights(tmp_path / "w.weights.h5")
    if saved_with:
        model = compiled(hi.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    else:
        model = saving.compiled(hi.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    model.load_weights(tmp_path / "w.weights.h5")
    np.testing.assert_array_equal(model.get_weights()[0], source.get_weights()[0])


def test_decoupled_decay_is_relative_to_the_peak_of_the_schedule():
    factors = []
    for rate in (0.1, 2.0):
        inner = hi.optimizers.SGD(rate, weight_decay=0.5, decoupled_decay=True)
        hi.DistributedOptimizer(inner, schedule=hi.schedules.constant(2.0, epochs=4))
        zero = tf.constant(0.0)
        hyperparameters = StepHyperparameters(
            learning_rate=tf.constant(1.0),
            momentum=zero,
            phase=tf.constant(1.0),
            lower_bound=zero,
            upper_bound=zero,
            trust_ratio_exponent=tf.constant(1.0),
        )
        factors.append(float(inner.decoupled_decay_factor(hyperparameters)))
    assert factors == [0.5, 0.5]


def sgd_with_decoupled_decay(*values, **options):
    return hi.optimizers.SGD(*values, weight_decay=0.01, decoupled_decay=True, **options)


@pytest.mark.parametrize(
    "inner", [sgd_with_decoupled_decay, hi.optimizers.AdaBound], ids=["decoupled_decay", "final_lr"]
)
def test_schedule_without_a_peak_needs_the_learning_rate_of_the_constructor(inner):
    def schedule(start, end, batch):
        return {"learning_rate": 0.5}

    with pytest.raises(UserError, match=r"relative to the peak.*learning_rate=\.\.\."):
        hi.DistributedOptimizer(inner(), schedule=schedule)
    model = compiled(hi.DistributedOptimizer(inner(0.25), schedule=schedule))
    with pytest.raises(
        UserError, match=r"set to 0\.5\. .* relative to the peak.*learning_rate=0\.25"
    ):
        saving.fit(model, 1)
    model = compiled(hi.DistributedOptimizer(inner(0.5), schedule=schedule))
    saving.fit(model, 1)
    assert model.optimizer.inner.peak_learning_rate == 0.5


@pytest.mark.parametrize("is_distributed", [False, True])
@pytest.mark.parametrize("rate", [0.01, 1.0])
def test_learning_rate_scheduler_needs_the_peak_in_the_constructor(rate, is_distributed):
    def fit(inner):
        optimizer = hi.DistributedOptimizer(inner) if is_distributed else inner
        model = compiled(optimizer)
        saving.fit(model, 1, more=[keras.callbacks.LearningRateScheduler(lambda epoch: rate)])

    with pytest.raises(UserError, match=rf"set to {rate:g}\. decoupled_decay is relative"):
        fit(sgd_with_decoupled_decay())
    fit(sgd_with_decoupled_decay(rate))
    fit(hi.optimizers.SGD())


def test_learning_rate_below_the_default_after_the_first_update_is_not_rejected():
    model = compiled(hi.DistributedOptimizer(sgd_with_decoupled_decay()))
    saving.fit(model, 1)
    model.optimizer.learning_rate = 0.01
    with pytest.raises(UserError, match=r"learning_rate=0\.1 of its constructor"):
        model.optimizer.learning_rate = 0.2


def test_adabound_of_a_schedule_closes_its_bounds_on_final_lr_at_the_peak():
    inner = hi.optimizers.AdaBound(final_lr=0.3, gamma=1e6)
    schedule = hi.schedules.constant(0.02, epochs=1)
    optimizer = hi.DistributedOptimizer(inner, schedule=schedule, loss_scale=1)
    weight = keras.Variable([[1.0]])
    optimizer.build([weight])
    inner.hyperparameters.assign({"learning_rate": 0.01})
    optimizer.apply([tf.constant([[0.5]])])
    # The first moment is 0.1 g, and at half of the peak both bounds are half of final_lr.
    assert float(weight.numpy()[0, 0]) == pytest.approx(1.0 - 0.15 * 0.1 * 0.5, rel=1e-5)


def test_learning_rate_can_be_assigned_like_a_variable_of_keras():
    for inner in (hi.optimizers.SGD(0.5), keras.optimizers.SGD(0.5)):
        optimizer = hi.DistributedOptimizer(inner)
        optimizer.learning_rate.assign(optimizer.learning_rate * 0.5)
        assert float(optimizer.learning_rate) == float(inner.learning_rate.numpy()) == 0.25
    rate = hi.optimizers.SGD(0.5).learning_rate
    assert type(copy.deepcopy(rate)) is float


def test_variables_before_build_are_those_that_do_not_need_the_model():
    for inner in (hi.optimizers.LARS(), keras.optimizers.SGD()):
        optimizer = hi.DistributedOptimizer(inner, gradient_accumulation_steps=2)
        names = [variable.name for variable in optimizer.variables]
        assert {"iteration", "grad_norm", "micro_batches"} <= set(names)


def test_loaded_float16_model_scales_like_before_it_was_saved(tmp_path):
    policy = "mixed_float16"
    layers = [keras.Input((6,)), keras.layers.Dense(3, dtype=policy)]
    model = keras.Sequential(layers)
    model.compile(hi.DistributedOptimizer(keras.optimizers.SGD(0.1)), models.loss())
    saving.fit(model, 1)
    assert model.optimizer.reducer.wire_dtype == "float16"
    model.save(tmp_path / "model.keras")
    loaded = hi.load_model(tmp_path / "model.keras")
    saving.fit(loaded, 2, begin=1)
    assert loaded.optimizer.reducer.wire_dtype == "float16"
    scale = model.optimizer.loss_scale.scale
    assert loaded.optimizer.loss_scale.scale.numpy() == scale.numpy() > 1.0


def test_loaded_weights_keep_a_loss_scale_that_is_set(tmp_path):
    """The file has the dynamic scale of a training in FP16."""
    source = saving.compiled(hi.DistributedOptimizer("sgd", loss_scale="dynamic"))
    source.optimizer.build(source.trainable_variables)
    source.save_weights(tmp_path / "w.weights.h5")
    model = saving.compiled(hi.DistributedOptimizer("sgd"))
    model.optimizer.build(model.trainable_variables)
    model.load_weights(tmp_path / "w.weights.h5")
    assert model.optimizer.loss_scale.scale.numpy() == 1.0


def test_loss_that_is_scaled_in_a_graph_can_be_applied_outside_it():
    model = models.plain(3)
    optimizer = hi.DistributedOptimizer(keras.optimizers.SGD(0.1), loss_scale="dynamic")
    x, y = models.data(1)

    @tf.function
    def gradients(x, y):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(models.loss()(y, model(x, training=True)))
        return tape.gradient(scaled, model.trainable_variables)

    counts = []
    for _ in range(3):
        pairs = zip(gradients(x, y), model.trainable_variables, strict=True)
        counts.append(int(optimizer.apply_gradients(pairs)))
    assert counts == [1, 2, 3]


@pytest.mark.parametrize("in_graph", [False, True])
def test_unscaled_loss_after_a_step_that_scales_in_a_graph_is_rejected(in_graph):
    model = models.plain(3)
    optimizer = hi.DistributedOptimizer(keras.optimizers.SGD(0.1), loss_scale="dynamic")
    x, y = models.data(1)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(models.loss()(y, model(x, training=True)))
        optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)

    def unscaled_step(x, y):
        with tf.GradientTape() as tape:
            loss = models.loss()(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    step(x, y)
    with pytest.raises(UserError, match="a loss that was not scaled"):
        if in_graph:
            tf.function(unscaled_step, autograph=False)(x, y)
        else:
            unscaled_step(x, y)
