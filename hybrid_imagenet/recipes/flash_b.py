"""Configuration B of Mikami et al. at the batch of their reference run.

Command (1,024 GPUs with 32 images each, 32,768 images per step):

    hybrid-imagenet run -np 1024 -H HOSTS -- --recipe=flash_b --data_dir=DIR

Published: experiments 2 and 3 use configuration B. The reference run at this batch reached 75.40 %
top-1 in 505 s on 1,024 V100.

Mikami et al. never ran configuration B at this batch. Labels are not smoothed, as in the other run
with 32K images (Table 3).
"""

from hybrid_imagenet.recipes import Recipe
from hybrid_imagenet.recipes._flash import CONFIGURATION_B

RECIPE = Recipe(
    name="flash_b",
    summary="LARS, learning rate with jumps as printed, momentum that keeps the noise scale",
    source="Mikami et al., ImageNet/ResNet-50 in a Flash, 3.2 (configuration B)",
    hardware="1024 V100 (ABCI)",
    published="used in experiments 2 and 3; the reference run at 32K has 75.40 % top-1 in 505 s",
    overrides={
        **CONFIGURATION_B,
        "per_gpu_batch": 32,
    },
)
