"""Gradual warmup, then SGD with steps (Goyal et al.).

Lu et al. and the HAL benchmark use it as their baseline.

Command (4 GPUs with 256 images each, 1,024 images per step):

    hybrid-imagenet run -np 4 -- --recipe=gradual_warmup --data_dir=DIR

As published (256 GPUs with 32 images each, 8,192 images per step):

    hybrid-imagenet run -np 256 -H HOSTS -- --recipe=gradual_warmup --per_gpu_batch=32

Published: 76.3 % top-1 in 1 h on 32 x 8 P100 with 50 Gbit/s Ethernet (90 epochs).
"""

from hybrid_imagenet.recipes import Recipe

RECIPE = Recipe(
    name="gradual_warmup",
    summary=(
        "SGD with linear scaling, 5 epochs of warmup, learning rate / 10 at epochs 30, 60 and 80"
    ),
    source="Goyal et al., ImageNet in 1 Hour, 2.2, 5.1",
    hardware="32 x 8 P100, 50 Gbit/s Ethernet",
    published="76.3 % top-1 in 1 h (90 epochs, batch 8192)",
    overrides={
        "optimizer": "sgd",
        "lr_scaling": "batch",
        "lr_schedule": "step",
        "warmup_epochs": 5.0,
        "augmentation": "inception",
        "batch_norm": "moving",
    },
)
