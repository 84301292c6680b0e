"""AdaBound in all epochs: the adaptive baseline of Lu et al.

Command (24 GPUs, 6,144 images per step):

    hybrid-imagenet run -np 24 -H node1:8,node2:8,node3:8 -- --recipe=adabound --data_dir=DIR

Published: below gradual warmup and SGD, which has about 75.1 % top-1, on 3 x 8 V100.

Lu et al. only say that AdaBound is used alone. The bounds and the final learning rate are therefore
those of Luo et al. with lr * N, and Adam's learning rate decays as in `hybrid`.
"""

from hybrid_imagenet.recipes import Recipe

RECIPE = Recipe(
    name="adabound",
    summary="AdaBound for the whole training, with the bounds of Luo et al.",
    source="Lu, Lu, Liang, hybrid gradient computing, 3.2.1 (Fig. 3.1); Luo et al., ICLR 2019",
    hardware="3 x 8 V100, 40 Gbit/s RoCE",
    published="below gradual warmup + SGD, which has about 75.1 % top-1",
    overrides={
        "optimizer": "adabound",
        "per_gpu_batch": 256,
    },
)
