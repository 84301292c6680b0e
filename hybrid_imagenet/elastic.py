"""Training with ranks that come and go (`horovodrun --min-np --max-np --host-discovery-script`).

When a rank is lost, what the others communicate fails; when hosts come or go, all ranks agree on a step. Either way the
ranks connect anew, in the same processes, and build a session for their new number from the state committed last.
A rank that has just been started builds the same session and receives that state from rank 0, which the launcher makes
one of those that were there before.
"""

from __future__ import annotations

import gc

import keras

from hybrid_imagenet import train
from hybrid_imagenet.callbacks.commits import Memory
from hybrid_imagenet.comm import Communicator, Settings
from hybrid_imagenet.comm.elastic import RanksChangeError, is_loss
from hybrid_imagenet.comm.engine import HorovodCommunicator
from hybrid_imagenet.config import Config
from hybrid_imagenet.guardian import Guardian
from hybrid_imagenet.survivor import Survivor


def run(config: Config, communicator: Communicator, settings: Settings) -> str:
    """As `train.run`, with whatever ranks there are; what it leaves connected is for the caller to shut down.

    Raises:
      UserError: as `train.run`, and if the ranks cannot connect anew.
    """
    survivor = Survivor(Memory(), Guardian(config.stall_seconds) if config.stall_seconds else None)
    while True:
        try:
            return train.run(config, communicator, survivor=survivor)
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
