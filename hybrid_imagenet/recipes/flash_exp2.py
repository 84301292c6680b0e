"""Experiment 2 of Mikami et al.: label smoothing alone, batch 54K throughout.

Mikami et al. halve the workers at epoch 45 and double their batch; with a fixed number of workers
nothing changes.
"""

from hybrid_imagenet.recipes import Recipe
from hybrid_imagenet.recipes._sony import CONFIGURATION_B

RECIPE = Recipe(
    name="flash_exp2",
    summary="configuration B, batch 54K, label smoothing",
    source="Mikami et al., ImageNet/ResNet-50 in a Flash, Tables 3 and 5",
    hardware="3456 V100 (ABCI)",
    published="75.29 % top-1 in 122 s",
    overrides={
        **CONFIGURATION_B,
        "per_gpu_batch": 16,
        "label_smoothing": 0.1,
        "batch_schedule": ("flash_exp2",),
    },
)
