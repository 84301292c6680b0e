"""Checks before the first step of an optimizer that all ranks start from the same state."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from hybrid_imagenet import private_api
from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.comm.agreement import check_agreement, digest
from hybrid_imagenet.order.same_order import check_same_order

if TYPE_CHECKING:
    from hybrid_imagenet.optimizers.keras_protocol import KerasProtocol

_BROADCAST_REMEDY = (
    "pass callbacks=hybrid_imagenet.callbacks.default_callbacks() to fit, or call"
    " hybrid_imagenet.broadcast_model(model), once the model has all its weights; pass callbacks"
    " that change the learning rate to fit on every rank"
)
# The weights may also be equal because every rank has read the same file. Then this is true as
# well, because only the broadcast gives each rank its own random numbers.
_NO_BROADCAST = (
    "the weights of all ranks are equal at the first step, but no rank has sent them to the others."
    " If they are equal only because of equal seeds, a different order of calls makes them differ,"
    " and layers such as dropout may draw the same numbers on every rank. Call"
    " hybrid_imagenet.broadcast_model(model) on every rank before the first step, or pass"
    " callbacks=hybrid_imagenet.callbacks.default_callbacks() to fit"
)

_log = logging.getLogger(__name__)


def check_ranks_agree(optimizer: KerasProtocol, communicator: Communicator) -> None:
    """Compares weights and state over ranks, because a broadcast may be missing.

    Every rank calls it. A single process has nothing to compare.

    Args:
      optimizer: Optimizer that is about to take its first step in this process.
      communicator: Connects the ranks.

    Raises:
      SharedError: On all ranks, if their weights, states or data differ.
    """
    if communicator.size == 1:
        return
    check_same_order(communicator)
    learning_rate = private_api.learning_rate_variable(optimizer.inner)
    state = [variable for variable in optimizer.variables if variable is not learning_rate]
    values = {
        "weights": digest(private_api.trainable_variables(optimizer)),
        "optimizer state": digest(state),
        # keras.optimizers.MultiOptimizer has none.
        "learning rate": np.float32(getattr(optimizer, "learning_rate", 0)),
    }
    check_agreement(communicator, values, "before the first step", _BROADCAST_REMEDY)
    has_model = not optimizer.updates_tf_variables
    if has_model and not communicator.has_broadcast_model and communicator.rank == 0:
        _log.warning(_NO_BROADCAST)
    has_several_hosts = len(set(communicator.hosts)) > 1
    if optimizer.sends_float32_by_default and has_several_hosts and communicator.rank == 0:
        _log.warning('gradients are sent in FP32; compression="fp16" halves them')
