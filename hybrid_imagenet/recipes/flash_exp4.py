"""Experiment 4 of Mikami et al.: batch up to 119K, and label smoothing.

The batch is 34K, 68K, 85K and 119K images from epochs 0, 30, 45 and 75.

Command (2,176 GPUs, 34,816 to 121,856 images per step):

    hybrid-imagenet run -np 2176 -H HOSTS -- --recipe=flash_exp4 --data_dir=DIR

Published: 75.23 % top-1 in 129 s on 4,096 V100.

Table 3 marks label smoothing for this experiment, while section 3.3 calls it batch-size control
alone. The recipe follows the table.

Mikami et al. change the number of workers, none of which has more than 32 images. This program
keeps 2,176 GPUs: each takes 16 images per update, then two micro-batches of 16, 20 and 28 images.
That way batch normalization sees batches as small as theirs. Table 3 lists 68K at 16 images per
worker, which would need 4,352 GPUs, more than their 4,096.
"""

from hybrid_imagenet.recipes import Recipe
from hybrid_imagenet.recipes._flash import CONFIGURATION_A

RECIPE = Recipe(
    name="flash_exp4",
    summary="configuration A (flash_a), batch 34K to 119K, label smoothing",
    source="Mikami et al., ImageNet/ResNet-50 in a Flash, Tables 3 and 5",
    hardware="4096 V100 (ABCI)",
    published="75.23 % top-1 in 129 s",
    overrides={
        **CONFIGURATION_A,
        "per_gpu_batch": 16,
        "label_smoothing": 0.1,
        "batch_schedule": ("flash_exp4",),
        "batch_growth": "accumulation",
    },
)
