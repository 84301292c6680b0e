"""Experiment 3 of Mikami et al.: batch-size control and label smoothing, 54K to 64K at epoch 30.

Mikami et al. go from 16 images on 3456 GPUs to 32 on 2048; on a fixed number, 2048 here, a GPU goes
from 27 to 32.
"""

from hybrid_imagenet.recipes import Recipe
from hybrid_imagenet.recipes._sony import CONFIGURATION_B

RECIPE = Recipe(
    name="flash_exp3",
    summary="configuration B, batch 54K to 64K, label smoothing",
    source="Mikami et al., ImageNet/ResNet-50 in a Flash, Tables 3 and 5",
    hardware="3456 V100 (ABCI)",
    published="74.62 % top-1 in 115 s",
    overrides={
        **CONFIGURATION_B,
        "per_gpu_batch": 27,
        "label_smoothing": 0.1,
        "batch_schedule": ("flash_exp3",),
    },
)
