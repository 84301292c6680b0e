"""Hybrid gradient computing exactly as Lu et al. print it, also where `hybrid` reads them
otherwise.

docs/hybrid.md compares the two line by line. The paper does not print the coefficient of LARS. It
follows from the batch (`config.defaults`), so that the first step after the warmup moves each layer
as far as MLPerf's tuned runs do.
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
        "model": "resnet50_v1",  # [5] of the paper is He et al. 2015
        "adabound_bound_time": "epoch",  # "t is the current epoch"
        "hybrid_bias_correction": False,  # α / √V has no factor for t
        "lr_decay_exponent": "epoch",  # α = lr N κ^epoch
        "momentum": 0.0,  # x = x - α g
        "hybrid_handover": "reset",  # without momentum there is no velocity to hand over
        "decay_all": True,  # "weight decay [1]", which is AlexNet's, makes no exception
    },
)
