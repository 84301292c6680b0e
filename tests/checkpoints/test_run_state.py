"""The state of a run in a checkpoint, and restoring variables from it."""

import dataclasses
import pathlib
import types

import numpy as np
import pytest

from hybrid_imagenet.checkpoints.archive import CheckpointArchive
from hybrid_imagenet.checkpoints.run_state import (
    RunState,
    check_epoch_order,
    describe_order,
    restore_arrays,
)
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order.sampling import Cursor, SampleOrder
from hybrid_imagenet.order.shard_order import ShardOrder
from tests.checkpoints.support import meta

ORDER = SampleOrder(64, seed=3)


def checkpoint(offset, order):
    values = meta(5, order=describe_order(order))
    values["state"]["cursor"]["offset"] = offset
    return CheckpointArchive(pathlib.Path("step-000000005.npz"), {}, values)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (
            SampleOrder(64, seed=4),
            "--seed=4: the run was interrupted within epoch 2, which it began with --seed=3",
        ),
        (
            ShardOrder([32, 32], 2, seed=3),
            "--shuffle_window=2: the run .* began with --shuffle_window=0. Resume with that",
        ),
    ],
)
def test_check_epoch_order_raises_for_another_order_only_within_an_epoch(order, message):
    with pytest.raises(UserError, match=message):
        check_epoch_order(checkpoint(8, ORDER), order)
    check_epoch_order(checkpoint(0, ORDER), order)


class Variable(types.SimpleNamespace):
    def assign(self, value):
        self.value = value


SHAPES = {
    "model/0000/stem/kernel": (3, 3),
    "model/0001/block/conv/kernel": (4,),
    "optimizer/0000/sgd/m": (3, 3),
}


def variables(shapes):
    return {
        name: Variable(path=name.split("/", 2)[2], shape=shape, value=None)
        for name, shape in shapes.items()
    }


def test_restore_arrays_assigns_each_array_to_the_variable_with_its_name():
    stored = {name: np.ones(shape) for name, shape in SHAPES.items()}
    restored = variables(SHAPES)
    restore_arrays(CheckpointArchive(pathlib.Path("x.npz"), stored, {}), restored)
    assert all(variable.value is stored[name] for name, variable in restored.items())


def test_restore_arrays_of_fit_ignores_the_path():
    stored = {"model/0000/dense/kernel": np.ones((3, 3))}
    restored = variables({"model/0000/dense_1/kernel": (3, 3)})
    written_by_fit = CheckpointArchive(pathlib.Path("x.npz"), stored, {"optimizers": {}})
    restore_arrays(written_by_fit, restored)
    assert restored["model/0000/dense_1/kernel"].value is stored["model/0000/dense/kernel"]


def test_restore_arrays_of_fit_assigns_each_variable_of_a_callback():
    names = ["ema/dense/kernel", "ema/dense/bias"]
    stored = {name: np.ones((3, 3)) for name in names}
    restored = variables(dict.fromkeys(names, (3, 3)))
    written_by_fit = CheckpointArchive(pathlib.Path("x.npz"), stored, {"optimizers": {}})
    restore_arrays(written_by_fit, restored)
    assert all(restored[name].value is stored[name] for name in names)


def test_restore_arrays_of_fit_with_another_dropout_layer_names_random_layers():
    stored = {"model/0000": np.ones((3, 3)), "random/0000": np.ones(2)}
    written_by_fit = CheckpointArchive(pathlib.Path("x.npz"), stored, {"optimizers": {}})
    with pytest.raises(UserError, match="the models have other random layers"):
        restore_arrays(written_by_fit, variables({"model/0000/dense/kernel": (3, 3)}))


def test_restore_arrays_of_the_program_compares_the_path():
    stored = {"model/0000/dense/kernel": np.ones((3, 3))}
    written_by_program = CheckpointArchive(pathlib.Path("x.npz"), stored, {"optimizer": "lars"})
    with pytest.raises(UserError, match="the networks differ, first in layer dense"):
        restore_arrays(written_by_program, variables({"model/0000/other/kernel": (3, 3)}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"model/0000/stem/kernel": (5, 5)},
            "layer stem has weights of 3 x 3 there, 5 x 5 here (it has 10 classes)",
        ),
        ({"model/0001/block/conv/kernel": None}, "the networks differ, first in layer block/conv"),
        ({"optimizer/0001/sgd/v": (3, 3)}, "--optimizer=lars or another --ema_decay"),
        ({"ema/dense/kernel": (3, 3)}, "only this run has ema/dense/kernel, a variable of a call"),
    ],
)
def test_restore_arrays_of_another_run_raises_with_the_name_of_the_layer(change, words):
    stored = {name: np.ones(shape) for name, shape in SHAPES.items()}
    shapes = {name: shape for name, shape in (SHAPES | change).items() if shape is not None}
    unchanged = variables(shapes)
    with pytest.raises(UserError) as caught:
        restore_arrays(
            CheckpointArchive(
                pathlib.Path("x.npz"), stored, {"num_classes": 10, "optimizer": "lars"}
            ),
            unchanged,
        )
    assert words in str(caught.value)
    assert "/0000/" not in str(caught.value) and "/0001/" not in str(caught.value)
    assert all(variable.value is None for variable in unchanged.values())


def test_run_state_restores_all_fields_but_why_the_session_ended():
    schedule_values = {"momentum": 0.9}
    state = RunState(
        Cursor(2, 8), step=5, recorded_at=1.5, schedule_values=schedule_values, stop="target"
    )
    values = state.to_dict()
    assert "stop" not in values
    restored = RunState()
    restored.restore(values)
    assert restored == dataclasses.replace(state, stop="")


@pytest.mark.parametrize(
    ("best_top1", "best_epoch", "target", "expected"),
    [
        (0.5, 2, 0.5, True),
        (0.5, 2, 0.6, False),
        (0.5, 2, None, False),
        (0.0, 1, 0.0, True),
        (0.0, 0, 0.0, False),
    ],
    ids=["reached", "not reached", "no target", "accuracy of 0", "not validated"],
)
def test_run_state_has_reached_a_target_after_a_validation_with_it(
    best_top1, best_epoch, target, expected
):
    state = RunState(best_top1=best_top1, best_epoch=best_epoch)
    assert state.has_reached(target) is expected
