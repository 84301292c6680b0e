"""Continues training with the ranks that are left (`horovodrun --min-np --max-np --host-discovery-script`).

When a rank is lost, what the others communicate fails; when hosts come or go, all ranks agree on a step. Either way the
ranks connect anew, in the same processes, and build a session for their new number from the state committed last.
A rank that has just been started builds the same session and receives that state from rank 0, which the launcher makes
one of those that were there before.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import keras

from hybrid_imagenet.comm import Communicator, Settings
from hybrid_imagenet.comm.elastic import RanksChangeError
from hybrid_imagenet.comm.horovod_engine import HorovodCommunicator
from hybrid_imagenet.comm.loss import is_loss
from hybrid_imagenet.resilience.elastic_state import Memory, Survivor
from hybrid_imagenet.resilience.reaper import Guardian

Train = Callable[[Communicator, Survivor], str]


def run(train: Train, communicator: Communicator, settings: Settings, stall_seconds: float) -> str:
    """Calls `train` until it ends by itself, with whatever ranks there are; the caller shuts down what is connected.

    Args:
      train: trains from what the survivor keeps; returns why it ended.
      communicator: the ranks at the start.
      settings: how gradients travel.
      stall_seconds: a stopped rank is killed after so many seconds; 0: never.

    Raises:
      UserError: as `train`, and if the ranks cannot connect anew.
    """
    survivor = Survivor(Memory(), Guardian(stall_seconds) if stall_seconds else None)
    while True:
        try:
            return train(communicator, survivor)
        except RanksChangeError:
            pass
        except Exception as error:
            if not is_loss(error):
                raise
        # Not inside of the handler: the error would hold the old session's network in memory.
        gc.collect()
        keras.utils.clear_session()
        assert isinstance(communicator, HorovodCommunicator)
        communicator = communicator.rejoin(settings)
