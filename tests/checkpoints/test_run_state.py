import pathlib
import types

import numpy as np
import pytest

from hybrid_imagenet.checkpoints.archive import Checkpoint
from hybrid_imagenet.checkpoints.run_state import check_position, described, restore_arrays
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order.sampling import SampleOrder
from hybrid_imagenet.order.shard_order import ShardOrder
from tests.checkpoints.support import meta

ORDER = SampleOrder(64, seed=3)


def checkpoint(offset, order):
    values = meta(5, order=described(order))
    values["state"]["cursor"]["offset"] = offset
    return Checkpoint(pathlib.Path("step-000000005.npz"), {}, values)


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (
            SampleOrder(64, seed=4),
            "--seed=4: the run stands inside of epoch 2, whose order has --seed=3; resume with",
        ),
        (
            ShardOrder([32, 32], 2, seed=3),
            "--shuffle_window=2: the run .* has --shuffle_window=0; resume with that",
        ),
    ],
)
def test_another_order_is_refused_inside_of_an_epoch_alone(now, message):
    with pytest.raises(UserError, match=message):
        check_position(checkpoint(8, ORDER), now)
    check_position(checkpoint(0, ORDER), now)


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


def test_arrays_go_to_the_variables_of_their_names():
    stored = {name: np.ones(shape) for name, shape in SHAPES.items()}
    found = variables(SHAPES)
    restore_arrays(Checkpoint(pathlib.Path("x.npz"), stored, {}), found)
    assert all(variable.value is stored[name] for name, variable in found.items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"model/0000/stem/kernel": (5, 5)},
            "layer stem has weights of 3 x 3 there, 5 x 5 here (it has 10 classes)",
        ),
        ({"model/0001/block/conv/kernel": None}, "the networks differ, first in layer block/conv"),
        ({"optimizer/0001/sgd/v": (3, 3)}, "--optimizer=lars, or another --ema_decay"),
    ],
)
def test_another_run_is_refused_by_a_sentence_that_names_the_layer(change, words):
    stored = {name: np.ones(shape) for name, shape in SHAPES.items()}
    wanted = {name: shape for name, shape in (SHAPES | change).items() if shape is not None}
    found = variables(wanted)
    with pytest.raises(UserError) as caught:
        restore_arrays(
            Checkpoint(pathlib.Path("x.npz"), stored, {"num_classes": 10, "optimizer": "lars"}),
            found,
        )
    assert words in str(caught.value)
    assert "/0000/" not in str(caught.value) and "/0001/" not in str(caught.value)
    assert all(variable.value is None for variable in found.values())
