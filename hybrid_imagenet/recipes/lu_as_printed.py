"""Hybrid gradient computing as Lu et al. print it, except for two details of LARS.

As in You et al., weight decay is part of the ratio's denominator, and biases and normalization
parameters have a ratio of 1. `hybrid` reads the paper differently in some places;
docs/hybrid.md compares the two line by line.

Command (24 GPUs, 6,144 images per step):

    hybrid-imagenet run -np 24 -H node1:8,node2:8,node3:8 -- --recipe=lu_as_printed --data_dir=DIR

Published: 75.6 % top-1 in 53 min on 3 x 8 V100 with 40 Gbit/s RoCE (90 epochs); 75 % after 32
epochs.

The paper prints no coefficient of LARS. It follows from the batch (`config.defaults`): in the first
step after the warmup, LARS moves each layer as far as in MLPerf's tuned runs.
"""

from hybrid_imagenet.recipes import Recipe

RECIPE = Recipe(
    name="lu_as_printed",
    summary="hybrid to the letter: ResNet v1, epoch numbers in bounds and decay, no momentum",
    source="Lu, Lu, Liang, hybrid gradient computing, 2.2 and 3.1",
    hardware="3 x 8 V100, 40 Gbit/s RoCE",
    published="75.6 % top-1 in 53 min (90 epochs); 75 % after 32 epochs",
    overrides={
        "per_gpu_batch": 256,
        # The paper refers to He et al. 2015 ([5]), which describe version 1.
        "model": "resnet50_v1",
        # "t is the current epoch".
        "adabound_bound_time": "epoch",
        # α / √V has no factor that depends on t.
        "hybrid_bias_correction": False,
        # α = lr N κ^epoch.
        "lr_decay_exponent": "epoch",
        # x = x - α g has no velocity, so there is none to hand over after the warmup either.
        "momentum": 0.0,
        "hybrid_handover": "reset",
        # For weight decay the paper cites AlexNet ([1]), and it names no exceptions.
        "decay_all": True,
    },
)
