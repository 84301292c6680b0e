"""Tests in which type gradients are sent and how the loss is scaled, on one rank."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hybrid_imagenet as hi
from hybrid_imagenet.comm import SingleProcess, process
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.optimizers.first_step_check import check_ranks_agree
from hybrid_imagenet.optimizers.precision import choose, computes_in_float16


@pytest.mark.parametrize(
    ("compression", "loss_scale", "computes_in_float16", "num_ranks", "expected"),
    [
        ("auto", "auto", True, 2, ("float16", 2.0**15, True)),
        ("auto", "auto", True, 1, ("float16", 2.0**15, True)),
        ("auto", "auto", False, 2, ("float32", 1.0, False)),
        ("auto", "auto", False, 1, ("float32", 1.0, False)),
        ("fp16", "auto", False, 2, ("float16", 2.0**12, True)),
        # A single rank sends nothing.
        ("fp16", "auto", False, 1, ("float16", 1.0, False)),
        ("bf16", "auto", False, 2, ("bfloat16", 1.0, False)),
        ("none", "auto", True, 2, ("float32", 2.0**15, True)),
        ("auto", "dynamic", False, 1, ("float32", 2.0**12, True)),
        ("auto", "dynamic", True, 1, ("float16", 2.0**15, True)),
        ("auto", 128, True, 2, ("float16", 128.0, False)),
        ("fp16", "1", False, 2, ("float16", 1.0, False)),
    ],
)
def test_choose_follows_from_arguments_model_and_ranks(
    compression, loss_scale, computes_in_float16, num_ranks, expected
):
    precision = choose(
        compression, loss_scale, computes_in_float16=computes_in_float16, num_ranks=num_ranks
    )
    scale = (precision.initial_scale, precision.is_scale_dynamic)
    assert (precision.wire_dtype, *scale) == expected


def network(policy, inputs=3, units=2):
    return keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(units, dtype=policy)])


class Pair(keras.Model):
    """A model around a network in FP16 and one in FP32, such as a GAN."""

    def __init__(self):
        super().__init__()
        self.maker = network("mixed_float16", 2, 3)
        self.critic = network("float32", 3, 1)


def test_computes_in_float16_of_a_part_of_a_model_follows_from_the_layers_of_the_part():
    pair = Pair()
    assert computes_in_float16(pair, pair.maker.trainable_variables)
    assert not computes_in_float16(pair, pair.critic.trainable_variables)
    assert computes_in_float16(pair, pair.trainable_variables)
    assert computes_in_float16(pair, ())


def test_computes_in_float16_of_a_whole_model_counts_layers_without_trained_weights():
    """Gradients of the first layer pass through the second one."""
    model = keras.Sequential([network("float32"), network("mixed_float16", 2)])
    model.layers[1].trainable = False
    assert computes_in_float16(model, model.trainable_variables)


def test_optimizers_of_a_pair_of_networks_scale_in_their_own_type():
    pair = Pair()
    maker, critic = (hi.DistributedOptimizer("sgd", communicator=SingleProcess()) for _ in range(2))
    for optimizer, part in ((maker, pair.maker), (critic, pair.critic)):
        optimizer.attach(pair)
        optimizer.build(part.trainable_variables)
    assert (maker.reducer.wire_dtype, maker.loss_scale.dynamic) == ("float16", True)
    assert (critic.reducer.wire_dtype, critic.loss_scale.is_one) == ("float32", True)


def test_optimizer_that_is_built_before_its_model_is_known_chooses_again():
    """`load_model` builds the optimizer before it knows the model."""
    model = network("mixed_float16")
    optimizer = hi.DistributedOptimizer("sgd", communicator=SingleProcess())
    optimizer.build(model.trainable_variables)
    assert optimizer.reducer.wire_dtype == "float32"
    # As if a file had this value.
    optimizer.loss_scale.scale.assign(2.0**12)
    optimizer.loss_scale.keep_setting()
    assert optimizer.loss_scale.scale.numpy() == 1.0
    optimizer.attach(model)
    assert optimizer.reducer.wire_dtype == "float16"
    assert optimizer.loss_scale.scale.numpy() == 2.0**12


def test_scale_of_an_optimizer_that_is_attached_late_begins_at_its_initial_value():
    model = network("mixed_float16")
    optimizer = hi.DistributedOptimizer("sgd", communicator=SingleProcess())
    optimizer.build(model.trainable_variables)
    optimizer.attach(model)
    assert optimizer.loss_scale.scale.numpy() == 2.0**15


@pytest.mark.parametrize("in_graph", [True, False])
def test_first_step_without_broadcast_uses_one_scale_for_loss_and_gradients(in_graph):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = network("mixed_float16")
        optimizer = hi.DistributedOptimizer(keras.optimizers.SGD(1.0))
        before = [v.numpy() for v in model.trainable_variables]

        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.cast(model(tf.ones([4, 3])), tf.float32)) / 64
                scaled = optimizer.scale_loss(loss)
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(scaled, variables), variables)

        (tf.function(step) if in_graph else step)()
    finally:
        keras.config.set_dtype_policy("float32")
    assert optimizer.loss_scale.scale.numpy() == 2.0**15
    for variable, old in zip(model.trainable_variables, before, strict=True):
        np.testing.assert_allclose(old - variable.numpy(), 1 / 128, rtol=2e-3)


def test_second_optimizer_of_a_loss_that_only_the_first_has_scaled_is_rejected():
    first, second = (hi.DistributedOptimizer("sgd", loss_scale="dynamic") for _ in range(2))
    variables = [keras.Variable(np.ones(3, np.float32), name=name) for name in "ab"]
    scaled = float(first.scale_loss(tf.constant(1.0)))
    first.apply([tf.fill([3], scaled)], variables[:1])
    with pytest.raises(UserError, match=r"was not scaled.* for each optimizer its own"):
        second.apply([tf.fill([3], scaled)], variables[1:])


def test_optimizer_made_before_init_uses_its_settings_when_it_connects(monkeypatch):
    """A launcher has started several ranks, and `hi.init` comes after the optimizer."""
    used = []
    monkeypatch.setattr(process, "is_initialized", lambda: False)
    optimizer = hi.DistributedOptimizer("sgd", allreduce="masters", fusion_threshold_mb=2)
    monkeypatch.undo()
    monkeypatch.setattr(process, "set_default_settings", used.append)
    optimizer.connect()
    assert [(settings.allreduce, settings.fusion_threshold_mb) for settings in used] == [
        ("masters", 2)
    ]


class TwoHosts(SingleProcess):
    """Replaces rank 0 of two ranks on different hosts, of which the other one does the same."""

    def __init__(self):
        super().__init__()
        self.size = 2
        self.hosts = ("a", "b")

    def allgather_object(self, obj):
        return [obj, obj]


@pytest.mark.parametrize(
    ("compression", "policy", "is_advised"),
    [
        ("auto", "float32", True),
        ("none", "float32", False),
        ("fp16", "float32", False),
        ("auto", "mixed_float16", False),
    ],
)
def test_first_step_on_several_hosts_says_that_fp16_halves_what_fp32_models_send(
    caplog, compression, policy, is_advised
):
    model = network(policy)
    optimizer = hi.DistributedOptimizer("sgd", compression=compression)
    optimizer.attach(model)
    optimizer.build(model.trainable_variables)
    check_ranks_agree(optimizer, TwoHosts())
    line = 'gradients are sent in FP32; compression="fp16" halves them'
    assert (line in caplog.messages) == is_advised
