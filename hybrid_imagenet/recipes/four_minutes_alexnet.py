"""Mixed-precision training with LARS at batch 64K: AlexNet of Jia et al., with BN after pool5 too.

Jia et al. give no learning rates; MLPerf's table for the batch stands in, with its momentum and
decay. The two thresholds are ours too: packed gradients go by masters, single ones of 1 MiB and
more by the ring.
"""

from hybrid_imagenet.recipes import Recipe

RECIPE = Recipe(
    name="four_minutes_alexnet",
    summary="AlexNet with batch normalization, LARS, size-switched all-reduce",
    source="Jia et al., Training ImageNet in Four Minutes, 3",
    hardware="1024 P40, 100 Gbit/s Ethernet",
    published="58.7 % top-1 in 4 min (95 epochs, batch 65536)",
    overrides={
        "model": "alexnet_bn",
        "optimizer": "lars",
        "lr_schedule": "mlperf",
        "bn_group": 1,  # the table has a group; the paper does not
        "per_gpu_batch": 64,
        "epochs": 95,
        "allreduce": "size_switched",
        "fusion_threshold_mb": 0.5,
        "size_switch_kb": 1024,
    },
)
