"""Connects ranks through Horovod or TensorFlow's runtime, and sums tensors over them.

This is the only package that imports Horovod. The program calls `start` once per process, before
TensorFlow is used, and gets a `Communicator`. A process that trains its own model calls
`process.init` instead, and is connected when its optimizer is known.
"""

from hybrid_imagenet.cluster.environment import read_placement
from hybrid_imagenet.comm.communicator import Communicator
from hybrid_imagenet.comm.process import start
from hybrid_imagenet.comm.settings import CommunicationSettings
from hybrid_imagenet.comm.single_process import SingleProcess

__all__ = ["CommunicationSettings", "Communicator", "SingleProcess", "read_placement", "start"]
