"""Adds one number per rank over all ranks; fails unless the sum is right. Run under a launcher by the set-up."""

import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
total = float(hvd.allreduce(tf.constant(float(hvd.rank() + 1)), op=hvd.Sum))
expected = hvd.size() * (hvd.size() + 1) / 2
if hvd.size() < 2 or total != expected:
    raise SystemExit(f"error: {hvd.size()} ranks gave the sum {total}, not {expected}")
print(f"rank {hvd.rank()} of {hvd.size()}: sum {total}")
