"""AdaBound from the first epoch to the last, the adaptive baseline of Lu et al.

Lu et al. say no more than that AdaBound is used alone; bounds and final rate are as in Luo et al.
with lr * N, and Adam's rate decays as the base's does.
"""

from hybrid_imagenet.recipes import Recipe

RECIPE = Recipe(
    name="adabound",
    summary="AdaBound throughout, bounds of Luo et al.",
    source="Lu, Lu, Liang, hybrid gradient computing, 3.2.1 (Fig. 3.1); Luo et al., ICLR 2019",
    hardware="3 x 8 V100, 40 Gbit/s RoCE",
    published="less top-1 than gradual warmup + SGD (about 75.1 %)",
    overrides={
        "optimizer": "adabound",
        "per_gpu_batch": 256,
    },
)
