"""Hybrid gradient computing on cluster 1 (Lu, Lu, Liang): the base that the defaults describe.

The paper prints no coefficient of LARS; it follows from the batch (`config.defaults`,
docs/methods.md).
"""

from hybrid_imagenet.recipes import Recipe

RECIPE = Recipe(
    name="hybrid",
    summary="AdaBound-bounded warmup for 10 epochs, then linear-scaling SGD with LARS",
    source="Lu, Lu, Liang, hybrid gradient computing, 2.2",
    hardware="3 x 8 V100, 40 Gbit/s RoCE",
    published="75.6 % top-1 in 53 min (90 epochs); 75 % after 32 epochs",
    overrides={
        "per_gpu_batch": 256,
    },
)
