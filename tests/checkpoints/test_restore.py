import pathlib

import pytest

from hybrid_imagenet.checkpoints.archive import Checkpoint
from hybrid_imagenet.checkpoints.restore import check_position, described
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.numerics.sampling import SampleOrder
from hybrid_imagenet.numerics.shard_order import ShardOrder
from tests.checkpoints.support import meta

ORDER = SampleOrder(64, seed=3)


def checkpoint(offset, order):
    values = meta(5) if order is None else meta(5, order=described(order))
    values["state"]["cursor"]["offset"] = offset
    return Checkpoint(pathlib.Path("step-000000005.npz"), {}, values)


def test_a_position_behind_the_last_example_is_refused():
    for order in (None, ORDER):  # without one in older versions
        assert not check_position(checkpoint(63, order), ORDER)
        with pytest.raises(UserError, match="stands at example 63 of its epoch, but there are 63 training images; res"):
            check_position(checkpoint(63, order), SampleOrder(63, seed=3))


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (SampleOrder(64, seed=4), "--seed=4: the run stands inside of epoch 2, whose order has --seed=3; resume with"),
        (ShardOrder([32, 32], 2, seed=3), "--shuffle_window=2: the run .* has --shuffle_window=0; resume with that"),
    ],
)
def test_another_order_is_refused_inside_of_an_epoch_alone(now, message):
    with pytest.raises(UserError, match=message):
        check_position(checkpoint(8, ORDER), now)
    assert not check_position(checkpoint(0, ORDER), now)
    assert not check_position(checkpoint(8, None), now)


def test_another_number_of_examples_is_told():
    assert check_position(checkpoint(8, ORDER), SampleOrder(60, seed=3)) == (
        "60 training images, 64 when the checkpoint was written: the rest of epoch 2 is that of another order"
    )
