"""Experiment 1 of Mikami et al.: batch-size control without label smoothing.

The batch grows from 34K to 68K images at epoch 30, which is a reading of Table 3.

Command (2,176 GPUs, 34,816 to 69,632 images per step):

    hybrid-imagenet run -np 2176 -H HOSTS -- --recipe=flash_exp1 --data_dir=DIR

Published: 75.03 % top-1 in 224 s on 2,176 V100.
"""

from hybrid_imagenet.recipes import Recipe
from hybrid_imagenet.recipes._flash import CONFIGURATION_A

RECIPE = Recipe(
    name="flash_exp1",
    summary="configuration A (flash_a), batch 34K to 68K",
    source="Mikami et al., ImageNet/ResNet-50 in a Flash, Tables 3 and 5",
    hardware="2176 V100 (ABCI)",
    published="75.03 % top-1 in 224 s",
    overrides={
        **CONFIGURATION_A,
        "per_gpu_batch": 16,
        "batch_schedule": ("flash_exp1",),
    },
)
