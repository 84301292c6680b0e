"""Experiment 3 of Mikami et al.: batch-size control and label smoothing.

The batch grows from 54K to 64K images at epoch 30, which is a reading of Table 3.

Command (2,048 GPUs, 55,296 to 65,536 images per step):

    hybrid-imagenet run -np 2048 -H HOSTS -- --recipe=flash_exp3 --data_dir=DIR

Published: 74.62 % top-1 in 115 s on 3,456 V100.

Mikami et al. change from 16 images on each of 3,456 GPUs to 32 images on each of 2,048. This
program keeps the number of GPUs, so each of 2,048 GPUs changes from 27 to 32 images.
"""

from hybrid_imagenet.recipes import Recipe
from hybrid_imagenet.recipes._flash import CONFIGURATION_B

RECIPE = Recipe(
    name="flash_exp3",
    summary="configuration B (flash_b), batch 54K to 64K, label smoothing",
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
