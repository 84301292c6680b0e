"""A rank with a TensorFlow for GPUs, on a host that has none."""

import os
import sys

import tensorflow as tf

from hybrid_imagenet.main import main

os.environ.pop("CUDA_VISIBLE_DEVICES", None)
tf.test.is_built_with_cuda = lambda: True
sys.exit(main(sys.argv[1:]))
