"""The NCSA HAL benchmark: torchvision's ResNet-50 under distributed data parallel training.

It uses the official implementation of PyTorch, whose example gives all parameters to one optimizer:
biases and the scales and offsets of normalization decay as well. The learning rate warms up from 0,
as in the authors' code; Goyal et al. start at the rate of one GPU.
"""

from hybrid_imagenet.recipes import Recipe

RECIPE = Recipe(
    name="hal",
    summary="gradual warmup and steps with 208 images per GPU, decay on all parameters",
    source="NCSA HAL, ImageNet DDP benchmark",
    hardware="2 to 64 V100, 4 per node",
    published="76 % top-1, 93 % top-5; 20 h 36 m 51 s on 2 GPUs, 1 h 7 m 51 s on 64",
    overrides={
        "optimizer": "sgd",
        "lr_scaling": "batch",
        "lr_schedule": "step",
        "warmup_epochs": 5.0,
        "warmup_start_lr": 0.0,
        "per_gpu_batch": 208,
        "augmentation": "inception",
        "batch_norm": "moving",
        "zero_last_gamma": False,
        "decay_all": True,
    },
)
