"""AlexNet of Jia et al.: mixed precision and LARS at a batch of 64K images.

The network has batch normalization after each convolution, and after the last pooling too.

Command (1,024 GPUs, 65,536 images per step):

    hybrid-imagenet run -np 1024 -H HOSTS -- --recipe=four_minutes_alexnet --data_dir=DIR

Published: 58.7 % top-1 in 4 min on 1,024 P40 with 100 Gbit/s Ethernet (95 epochs).

Jia et al. print no learning rates, so the recipe uses those of MLPerf's table for the batch, with
its momentum and weight decay. They do not print the two thresholds of communication either. With
ours, packed gradients are summed by masters, and single gradients from 1 MiB on by the ring.
"""

from hybrid_imagenet.recipes import Recipe

RECIPE = Recipe(
    name="four_minutes_alexnet",
    summary="AlexNet with batch normalization, LARS, all-reduce by message size",
    source="Jia et al., Training ImageNet in Four Minutes, 3",
    hardware="1024 P40, 100 Gbit/s Ethernet",
    published="58.7 % top-1 in 4 min (95 epochs, batch 65536)",
    overrides={
        "model": "alexnet_bn",
        "optimizer": "lars",
        "lr_schedule": "mlperf",
        # MLPerf's table normalizes over a group of GPUs, Jia et al. on each GPU.
        "bn_group": 1,
        "per_gpu_batch": 64,
        "epochs": 95,
        "allreduce": "size_switched",
        "fusion_threshold_mb": 0.5,
        "size_switch_kb": 1024,
    },
)
