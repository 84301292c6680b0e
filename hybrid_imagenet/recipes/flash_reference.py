"""The reference run of Mikami et al.: LARS at 32,768 images with the settings of You et al. 2017.

Command (1,024 GPUs with 32 images each, 32,768 images per step):

    hybrid-imagenet run -np 1024 -H HOSTS -- --recipe=flash_reference --data_dir=DIR

Published: 75.40 % top-1 in 505 s on 1,024 V100 (Table 5).

Mikami et al. print no settings of this run; they refer to You et al. 2017. Section 3.2 says that
configuration B has the base learning rate of 29 from there, so the recipe takes the learning rate
of configuration B up to epoch 30 as that of the whole run: a warmup over 5 epochs from 0.2 to 29,
then polynomial decay of power 2. Here the decay begins at 29, where configuration B jumps.
"""

from hybrid_imagenet.recipes import Recipe
from hybrid_imagenet.recipes._flash import COMMON

RECIPE = Recipe(
    name="flash_reference",
    summary="LARS, 5 epochs of warmup to 29, polynomial decay, batch 32K",
    source="Mikami et al., ImageNet/ResNet-50 in a Flash, Tables 3 and 5 (reference)",
    hardware="1024 V100 (ABCI)",
    published="75.40 % top-1 in 505 s",
    overrides={
        **COMMON,
        "lr_schedule": "poly",
        "lr_scaling": "none",
        "lr": 29.0,
        "warmup_start_lr": 0.2,
        "warmup_epochs": 5.0,
        "per_gpu_batch": 32,
    },
)
