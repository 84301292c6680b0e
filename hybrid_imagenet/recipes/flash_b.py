"""Configuration B of Mikami et al. at the batch of their reference, 32 images on each of 1024 GPUs.

They never ran it there; labels are not smoothed at 32K (Table 3).
"""

from hybrid_imagenet.recipes import Recipe
from hybrid_imagenet.recipes._sony import CONFIGURATION_B

RECIPE = Recipe(
    name="flash_b",
    summary="LARS, rate as printed with its jumps, momentum from the noise scale",
    source="Mikami et al., ImageNet/ResNet-50 in a Flash, 3.2 (configuration B)",
    hardware="1024 V100 (ABCI)",
    published="configuration B is that of experiments 2 and 3; the reference has 75.40 % in 505 s",
    overrides={
        **CONFIGURATION_B,
        "per_gpu_batch": 32,
    },
)
