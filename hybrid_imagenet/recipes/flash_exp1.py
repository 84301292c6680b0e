"""Experiment 1 of Mikami et al.: batch-size control alone, 34K to 68K at epoch 30."""

from hybrid_imagenet.recipes import Recipe
from hybrid_imagenet.recipes._sony import CONFIGURATION_A

RECIPE = Recipe(
    name="flash_exp1",
    summary="configuration A, batch 34K to 68K",
    source="Mikami et al., ImageNet/ResNet-50 in a Flash, Tables 3 and 5",
    hardware="2176 V100 (ABCI)",
    published="75.03 % top-1 in 224 s",
    overrides={
        **CONFIGURATION_A,
        "per_gpu_batch": 16,
        "batch_schedule": ("flash_exp1",),
    },
)
