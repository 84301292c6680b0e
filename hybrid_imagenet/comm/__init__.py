"""Connects ranks and sums over them, by Horovod or TensorFlow's runtime: the only part that imports
Horovod.

`start` is called once per process, before TensorFlow is first used, and returns a `Communicator`. A
process that trains a model of its own calls `process.init` instead, and is connected when its
optimizer is known.
"""

from hybrid_imagenet.comm.communicator import Communicator
from hybrid_imagenet.comm.environment import placement
from hybrid_imagenet.comm.process import start
from hybrid_imagenet.comm.settings import CommunicationSettings
from hybrid_imagenet.comm.single_process import SingleProcess

__all__ = ["CommunicationSettings", "Communicator", "SingleProcess", "placement", "start"]
