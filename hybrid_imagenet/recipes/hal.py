"""The NCSA HAL benchmark: torchvision's ResNet-50, trained data parallel.

Command (64 GPUs, 13,312 images per step):

    hybrid-imagenet run -np 64 -H HOSTS -- --recipe=hal --data_dir=DIR

Published: 76 % top-1, 93 % top-5, in 20 h 37 min on 2 V100 and 1 h 8 min on 64 V100. The time on 2
V100 is computed from a run of 81 epochs; according to the records of that run 90 epochs take 20 h
52 min (studies/records/hal.md).

The benchmark uses PyTorch's official implementation. Its example passes all parameters to one
optimizer, so biases and the scales and offsets of normalization decay as well. The learning rate
warms up from 0, as in the authors' code, while Goyal et al. start at the learning rate of one GPU.

Kernels start with a variance of 2 / fan_in, as in all recipes. In the authors' code they start as
in torchvision, with 2 / fan_out.
"""

from hybrid_imagenet.recipes import Recipe

RECIPE = Recipe(
    name="hal",
    summary=(
        "as gradual_warmup, with 208 images per GPU, a warmup from 0 and decay of all parameters"
    ),
    source="NCSA HAL, ImageNet DDP benchmark",
    hardware="2 to 64 V100, 4 per node",
    published=(
        "76 % top-1, 93 % top-5; 20 h 37 min on 2 GPUs (computed from 81 epochs), 1 h 8 min on 64"
    ),
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
