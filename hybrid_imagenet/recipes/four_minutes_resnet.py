"""ResNet-50 of Jia et al.: mixed precision and LARS at a batch of 64K images.

Command (2,048 GPUs, 65,536 images per step):

    hybrid-imagenet run -np 2048 -H HOSTS -- --recipe=four_minutes_resnet --data_dir=DIR

Published: 75.8 % top-1 in 6.6 min on 2,048 P40 with 100 Gbit/s Ethernet (90 epochs).

Jia et al. print no learning rates, so the recipe uses those of MLPerf's table for the batch, with
its momentum and weight decay. They do not print the two thresholds of communication either. With
ours, packed gradients are summed by masters, and single gradients from 1 MiB on by the ring.
"""

from hybrid_imagenet.recipes import Recipe

RECIPE = Recipe(
    name="four_minutes_resnet",
    summary=(
        "LARS in FP32 with FP16 gradients, no decay of biases and normalization,"
        " all-reduce by message size"
    ),
    source="Jia et al., Training ImageNet in Four Minutes, 3",
    hardware="2048 P40, 100 Gbit/s Ethernet",
    published="75.8 % top-1 in 6.6 min (90 epochs, batch 65536)",
    overrides={
        "optimizer": "lars",
        "lr_schedule": "mlperf",
        # MLPerf's table normalizes over a group of GPUs, Jia et al. on each GPU.
        "bn_group": 1,
        "epochs": 90,
        "per_gpu_batch": 32,
        "allreduce": "size_switched",
        "fusion_threshold_mb": 0.5,
        "size_switch_kb": 1024,
    },
)
