"""Gradual warmup, then SGD with steps: the baseline that Lu et al. and the HAL benchmark compare
with.
"""

from hybrid_imagenet.recipes import Recipe

RECIPE = Recipe(
    name="gradual_warmup",
    summary="linear-scaling SGD, 5 epochs of gradual warmup, steps at 30, 60, 80",
    source="Goyal et al., ImageNet in 1 Hour, 2.2, 5.1",
    hardware="32 x 8 P100, 50 Gbit/s Ethernet",
    published="76.3 % top-1 in 1 h (90 epochs, batch 8192)",
    overrides={
        "optimizer": "sgd",
        "lr_scaling": "batch",
        "lr_schedule": "step",
        "warmup_epochs": 5.0,
        "augmentation": "inception",
        "batch_norm": "moving",
    },
)
