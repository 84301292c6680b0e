import pathlib

import pytest

from hybrid_imagenet.checkpoints.archive import Checkpoint
from hybrid_imagenet.checkpoints.restore import check_position
from hybrid_imagenet.errors import UserError
from tests.checkpoints.support import meta


def test_a_position_behind_the_last_example_is_refused():
    values = meta(5)
    values["state"]["cursor"]["offset"] = 63
    checkpoint = Checkpoint(pathlib.Path("step-000000005.npz"), {}, values)
    check_position(checkpoint, 64)
    with pytest.raises(UserError, match="stands at example 63 of its epoch, but there are 63 training images; resume"):
        check_position(checkpoint, 63)
