"""Adds one number per rank over all ranks; fails unless the sum is right. Run under a launcher by
the set-up.

Where GPUs are visible each rank takes one of its own, so that the sum is NCCL's.
"""

import contextlib

import horovod.tensorflow as hvd
import tensorflow as tf

# TensorFlow 2.21 finds no GPU unless cuSOLVER is loaded first. While an image is built, the sources
# of the package are not there yet, so that a change of the program does not build Horovod again;
# there is no GPU there either.
with contextlib.suppress(ModuleNotFoundError):
    from hybrid_imagenet.comm.gpus import load_cusolver

    load_cusolver()
hvd.init()
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
with tf.device("/gpu:0" if gpus else "/cpu:0"):
    total = float(hvd.allreduce(tf.constant(float(hvd.rank() + 1)), op=hvd.Sum))
expected = hvd.size() * (hvd.size() + 1) / 2
if hvd.size() < 2 or total != expected:
    raise SystemExit(f"error: {hvd.size()} ranks gave the sum {total}, not {expected}")
print(f"rank {hvd.rank()} of {hvd.size()}: sum {total}{' on GPUs' if gpus else ''}")
