"""Experiment 2 of Mikami et al.: label smoothing at a constant batch of 54K.

Command (3,456 GPUs, 55,296 images per step):

    hybrid-imagenet run -np 3456 -H HOSTS -- --recipe=flash_exp2 --data_dir=DIR

Published: 75.29 % top-1 in 122 s on 3,456 V100.

Mikami et al. halve the number of workers, in our reading of Table 3 at epoch 45, and double the
images of each. The global
batch stays the same, so with a constant number of workers nothing changes.
"""

from hybrid_imagenet.recipes import Recipe
from hybrid_imagenet.recipes._flash import CONFIGURATION_B

RECIPE = Recipe(
    name="flash_exp2",
    summary="configuration B (flash_b), batch 54K, label smoothing",
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
