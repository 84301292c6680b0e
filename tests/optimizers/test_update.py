"""The update of all variables as one vector equals the update of each variable.

The oracles in the other files check the packed form.
"""

import functools
from typing import NamedTuple
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet import optimizers
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.optimizers.average import WeightAverage
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer
from hybrid_imagenet.optimizers.kinds import ParameterKind as Kind
from hybrid_imagenet.optimizers.layout import Layout
from hybrid_imagenet.optimizers.loss_scale import LossScale

SHAPES = ((3, 3, 2, 4), (4,), (4,), (50, 40), (40,), (0,), (7, 7, 8, 16))
KINDS = (
    Kind.KERNEL,
    Kind.NORM_SCALE,
    Kind.NORM_OFFSET,
    Kind.KERNEL,
    Kind.BIAS,
    Kind.BIAS,
    Kind.KERNEL,
)
# One of the steps has an infinite gradient and is skipped.
STEPS = 6
BAD = 4

NORMS = Layout.norms


def norms_of_checked_rows(layout, rows):
    """Returns `layout.norms(rows)`, and raises InvalidArgumentError unless its padding is 0.

    XLA omits the check.
    """
    is_value = layout.pack([tf.ones(shape) for shape in layout.shapes])
    padding = tf.where(is_value == 1, 0.0, rows)
    message = "The rule passes values to ctx.layers.norms that are not 0 in the padding of rows."
    tf.debugging.assert_equal(padding, 0.0, message)
    return NORMS(layout, rows)


class Run:
    """Takes some steps of an optimizer with a dynamic loss scale and averaged weights."""

    def __init__(self, inner, packed, jit_compile=False, phase=0.0, average=True):
        random = np.random.default_rng(0)
        start = [random.normal(0, 0.5, s).astype(np.float32) for s in SHAPES]
        self.variables = [keras.Variable(w, name=f"w{i}") for i, w in enumerate(start)]
        inner.set_kinds(KINDS)
        average = WeightAverage(0.9) if average else None
        scale = LossScale(256.0, dynamic=True, growth_steps=3)
        self.optimizer = DistributedOptimizer(
            inner,
            loss_scale=scale,
            communicator=SingleProcess(),
            average=average,
            packed=packed,
        )
        self.optimizer.build(self.variables)
        self.optimizer.executor._jit_compile = jit_compile
        self.step = tf.function(
            lambda grads: self.optimizer.accumulate_or_update(grads), autograph=False
        )
        for number in range(STEPS):
            hyper = {"learning_rate": 0.1 + 0.01 * number, "lower_bound": 0.05, "upper_bound": 0.4}
            hyper["trust_ratio_exponent"] = number / (STEPS - 1)
            inner.hyperparameters.assign(
                hyper | {"momentum": 0.9, "phase": phase if phase in (0, 1) else float(number > 2)}
            )
            grads = [256 * random.normal(0, 1, s).astype(np.float32) for s in SHAPES]
            if number == BAD:
                grads[1][0] = np.inf
            with mock.patch.object(Layout, "norms", norms_of_checked_rows):
                self.step([tf.constant(g) for g in grads])

    def values(self):
        values_by_name = {f"w{i}": v.numpy() for i, v in enumerate(self.variables)}
        values_by_name |= {
            v.path.partition("/")[2] or v.path: v.numpy() for v in self.optimizer.variables
        }
        if self.optimizer.average is not None:
            values_by_name |= {
                f"average {i}": v.numpy() for i, v in enumerate(self.optimizer.average.variables)
            }
        return values_by_name | {"square_sums": self.optimizer.square_sums.numpy()}


LARS = {"optimizer": "lars", "trust_coefficient": 0.001}
HYBRID = {"optimizer": "hybrid", "trust_coefficient": 0.001}
CASES = {
    "sgd": ({"optimizer": "sgd", "weight_decay": 1e-4}, 0),
    "nesterov": (
        {"optimizer": "sgd", "nesterov": True, "weight_decay": 1e-4, "decay_all": True},
        0,
    ),
    "adabound": ({"optimizer": "adabound", "weight_decay": 1e-4}, 0),
    "warmup": (HYBRID | {"decay_in_warmup": True, "weight_decay": 1e-4}, 0),
    "without ratios": ({"optimizer": "hybrid", "lars_variant": "none", "weight_decay": 1e-4}, 1),
    "lars": (LARS | {"weight_decay": 1e-4}, 0),
    "larc": (LARS | {"variant": "larc", "nesterov": True, "weight_decay": 1e-4}, 0),
    "hybrid": (HYBRID | {"weight_decay": 1e-4}, 0.5),
    "decoupled": (HYBRID | {"decoupled_decay": True, "weight_decay": 0.01}, 0.5),
    "adamw": ({"optimizer": "adamw", "weight_decay": 0.05}, 0),
    "clipped": (HYBRID | {"weight_decay": 1e-4, "global_clipnorm": 3.0}, 0.5),
    "lamb": ({"optimizer": "lamb", "weight_decay": 0.01}, 0),
    "muon": ({"optimizer": "muon", "weight_decay": 0.01}, 0),
}


@functools.cache
def values_of(case, packed, jit_compile=False):
    """Returns the values after the steps of a case, which several tests compare."""
    arguments, phase = CASES[case]
    optimizer = optimizers.create(**arguments)
    return Run(optimizer, packed=packed, jit_compile=jit_compile, phase=phase).values()


# In these cases, sums are taken in another order: norms differ by about 1e-7, and TensorFlow may
# group the terms of a sum differently. Everything else is equal to the last bit.
ROUNDED = ("sgd", "lars", "larc", "hybrid", "decoupled", "clipped", "lamb", "muon")
# A rule with phases, one with a trust ratio for each layer, and one with matrix products.
ALWAYS_COMPILED = ("hybrid", "lars", "muon")


@pytest.mark.parametrize("case", CASES)
def test_packed_update_equals_the_update_per_variable(case):
    per_variable = values_of(case, packed=False)
    packed_values = values_of(case, packed=True)
    tolerance = 2e-6 if case in ROUNDED else 0.0
    for name, value in per_variable.items():
        slack = 2e-6 if name in ("grad_norm", "square_sums") else tolerance
        assert value.dtype == packed_values[name].dtype
        np.testing.assert_allclose(
            packed_values[name],
            value,
            rtol=slack,
            atol=slack * np.abs(value).max(initial=0),
            err_msg=name,
        )


def test_cases_of_packed_updates_cover_every_optimizer():
    assert {arguments["optimizer"] for arguments, _ in CASES.values()} == set(optimizers.NAMES)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=[] if name in ALWAYS_COMPILED else pytest.mark.slow)
        for name in optimizers.NAMES
    ],
)
def test_packed_update_compiled_by_xla_differs_only_by_rounding(case):
    """XLA fuses a multiplication and an addition, which then rounds once instead of twice."""
    plain = values_of(case, packed=True)
    compiled = values_of(case, packed=True, jit_compile=True)
    for name, value in plain.items():
        slack = 2e-6 * np.abs(value).max(initial=0)
        np.testing.assert_allclose(compiled[name], value, rtol=1e-5, atol=slack, err_msg=name)


class Direction(NamedTuple):
    direction: tf.Tensor


class Signs(GroupedOptimizer):
    """A minimal optimizer: w -= lr m with m = sign(g) + momentum m."""

    Slots = Direction

    def update(self, grad, weight, slots, ctx):
        direction = tf.sign(grad) + ctx.momentum * slots.direction
        return weight - ctx.learning_rate * direction, Direction(direction)


class ShiftedDirection(GroupedOptimizer):
    """A rule whose direction is 1 where gradient and weight are 0."""

    def update(self, grad, weight, slots, ctx):
        direction = grad + 1.0
        return weight - ctx.learning_rate * direction / ctx.layers.norms(direction), slots


def test_rule_that_counts_padding_in_its_norms_is_detected():
    with pytest.raises(tf.errors.InvalidArgumentError, match="not 0 in the padding of rows"):
        Run(ShiftedDirection(0.1, name="shifted"), packed=True, average=False)


def test_update_of_a_minimal_rule_works_packed_and_per_variable():
    per_variable, packed_values = (
        Run(Signs(0.1, name="signs"), packed=packed, average=False).values()
        for packed in (False, True)
    )
    for name in set(per_variable) - {"grad_norm", "square_sums"}:
        np.testing.assert_array_equal(packed_values[name], per_variable[name], err_msg=name)
    start = np.random.default_rng(0).normal(0, 0.5, SHAPES[0])
    assert 0.1 < np.abs(packed_values["w0"] - start).max() < 2


def test_unpack_returns_views_that_can_be_assigned_separately():
    """Unpacking copies nothing, and a later in-place change of one variable affects no other."""
    layout = Layout([(64, 32), (64,), (1000,)], [2, 0, 1])
    rows = layout.pack([tf.random.normal(shape) for shape in layout.shapes])
    pieces = layout.unpack(rows)
    assert np.shares_memory(np.asarray(memoryview(rows)), np.asarray(memoryview(pieces[0])))
    variables = [tf.Variable(tf.zeros(shape)) for shape in layout.shapes]

    @tf.function(autograph=False)
    def assign(rows):
        for i, value in layout.unpack(rows).items():
            variables[i].assign(value)

    assign(rows)
    before = [v.numpy() for v in variables]
    for i, value in pieces.items():
        np.testing.assert_array_equal(before[i], value.numpy())
    variables[1].assign_add(tf.ones([64]))
    np.testing.assert_array_equal(variables[1].numpy(), before[1] + 1)
    np.testing.assert_array_equal(variables[0].numpy(), before[0])
    np.testing.assert_array_equal(variables[2].numpy(), before[2])


def test_unpack_of_many_small_variables_splits_them_off_by_one_operation():
    layout = Layout([(64,)] * 50, range(50))
    pieces = layout.unpack(layout.pack([tf.fill([64], float(i)) for i in range(50)]))
    for i, piece in pieces.items():
        np.testing.assert_array_equal(piece.numpy(), np.full(64, i, np.float32))

    unpack = tf.function(lambda rows: list(layout.unpack(rows).values()), autograph=False)
    graph = unpack.get_concrete_function(tf.TensorSpec([50, 1024])).graph
    operations = [op.type for op in graph.get_operations()]
    assert operations.count("SplitV") == 1
    # Each other operation would take time to trace, for each of the variables.
    assert set(operations) - {"Const", "Identity"} == {"Placeholder", "Reshape", "SplitV"}
    assert operations.count("Reshape") == 1


def test_square_sums_of_packed_variables_equal_those_of_each_variable():
    layout = Layout(SHAPES, [6, 4, 3, 2, 1, 0])
    values = [
        np.random.default_rng(i).normal(size=shape).astype(np.float32)
        for i, shape in enumerate(SHAPES)
    ]
    sums = layout.square_sums(layout.pack([tf.constant(v) for v in values])).numpy()
    np.testing.assert_allclose(sums, [np.sum(v.astype(np.float64) ** 2) for v in values], rtol=1e-6)
    spread = layout.broadcast(tf.range(7.0)).numpy()
    np.testing.assert_array_equal(spread, layout.broadcast_constant(np.arange(7, dtype=np.float32)))
    assert spread[0, 0] == 6 and spread[-1, 0] == 0
