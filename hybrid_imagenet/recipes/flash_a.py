"""Configuration A of Mikami et al. at the batch of their reference run.

Command (1,024 GPUs with 32 images each, 32,768 images per step):

    hybrid-imagenet run -np 1024 -H HOSTS -- --recipe=flash_a --data_dir=DIR

Published: experiments 1 and 4 use configuration A. The reference run at this batch reached 75.40 %
top-1 in 505 s on 1,024 V100.
"""

from hybrid_imagenet.recipes import Recipe
from hybrid_imagenet.recipes._flash import CONFIGURATION_A

RECIPE = Recipe(
    name="flash_a",
    summary="LARS, 34 epochs of warmup to a learning rate of 34, polynomial decay",
    source="Mikami et al., ImageNet/ResNet-50 in a Flash, 3.2 (configuration A)",
    hardware="1024 V100 (ABCI)",
    published="used in experiments 1 and 4; the reference run at 32K has 75.40 % top-1 in 505 s",
    overrides={
        **CONFIGURATION_A,
        "per_gpu_batch": 32,
    },
)
