"""Configuration A of Mikami et al. at the batch of its reference, 32 images on each of 1024
GPUs.
"""

from hybrid_imagenet.recipes import Recipe
from hybrid_imagenet.recipes._sony import CONFIGURATION_A

RECIPE = Recipe(
    name="flash_a",
    summary="LARS, 34 epochs of warmup to 34, polynomial decay",
    source="Mikami et al., ImageNet/ResNet-50 in a Flash, 3.2 (configuration A)",
    hardware="1024 V100 (ABCI)",
    published="configuration A is that of experiments 1 and 4; the reference has 75.40 % in 505 s",
    overrides={
        **CONFIGURATION_A,
        "per_gpu_batch": 32,
    },
)
