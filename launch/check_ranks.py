"""Adds one number per rank over all ranks, and fails if the sum is wrong.

launch/setup.sh runs this program under a launcher. If GPUs are visible, each rank uses its own, so
that NCCL computes the sum.
"""

import contextlib

import horovod.tensorflow as hvd
import tensorflow as tf

# TensorFlow 2.21 finds no GPU unless cuSOLVER is loaded first. While an image is built, the package
# is missing: the sources are copied after Horovod is built, so that changing them does not build
# Horovod again. That does no harm, because there is no GPU at that time either.
with contextlib.suppress(ModuleNotFoundError):
    from hybrid_imagenet.cluster.gpus import load_cusolver

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
device = " on GPUs" if gpus else ""
print(f"rank {hvd.rank()} of {hvd.size()}: sum {total}{device}")
