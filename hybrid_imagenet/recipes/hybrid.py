"""Hybrid gradient computing on cluster 1 of Lu et al., which is the default.

Command (24 GPUs, 6,144 images per step):

    hybrid-imagenet run -np 24 -H node1:8,node2:8,node3:8 -- --recipe=hybrid --data_dir=DIR

Published: 75.6 % top-1 in 53 min on 3 x 8 V100 with 40 Gbit/s RoCE (90 epochs); 75 % after 32
epochs.

The paper prints no coefficient of LARS. It follows from the batch (`config.defaults`,
docs/methods.md).
"""

from hybrid_imagenet.recipes import Recipe

RECIPE = Recipe(
    name="hybrid",
    summary="AdaBound for the 10 epochs of the warmup, then SGD with linear scaling and LARS",
    source="Lu, Lu, Liang, hybrid gradient computing, 2.2",
    hardware="3 x 8 V100, 40 Gbit/s RoCE",
    published="75.6 % top-1 in 53 min (90 epochs); 75 % after 32 epochs",
    overrides={
        "per_gpu_batch": 256,
    },
)
