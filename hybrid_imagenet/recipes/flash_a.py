"""Configuration A of S at the batch of its reference, 32 images on each of 1024 GPUs.

S states a LARS coefficient of 0.01 and calls it the default, which in its library is 0.001: the base"s 0.001 stands.
"""

from hybrid_imagenet.recipes import Recipe

RECIPE = Recipe(
    name="flash_a",
    summary="LARS, 34 epochs of warmup to 34, polynomial decay",
    source="Mikami et al., ImageNet/ResNet-50 in a Flash, 3.2 (configuration A)",
    hardware="1024 V100 (ABCI)",
    published="configuration A is that of experiments 1 and 4; the reference has 75.40 % in 505 s",
    overrides={
        "optimizer": "lars",
        "lars_eps": 1e-06,
        "lars_eps_rule": "floor",
        "augmentation": "sony",
        "allreduce": "torus",
        "lr_schedule": "sony_a",
        "warmup_epochs": 34.0,
        "per_gpu_batch": 32,
    },
)
