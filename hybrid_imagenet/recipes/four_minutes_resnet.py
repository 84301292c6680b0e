"""Mixed-precision training with LARS at batch 64K: ResNet-50 of Jia et al.

Jia et al. give no learning rates; MLPerf's table for the batch stands in, with its momentum and
decay. The two thresholds are ours too: packed gradients go by masters, single ones of 1 MiB and
more by the ring.
"""

from hybrid_imagenet.recipes import Recipe

RECIPE = Recipe(
    name="four_minutes_resnet",
    summary="LARS in FP32 over FP16 gradients, no decay on bias and BN, size-switched all-reduce",
    source="Jia et al., Training ImageNet in Four Minutes, 3",
    hardware="2048 P40, 100 Gbit/s Ethernet",
    published="75.8 % top-1 in 6.6 min (90 epochs, batch 65536)",
    overrides={
        "optimizer": "lars",
        "lr_schedule": "mlperf",
        "bn_group": 1,  # the table has a group; the paper does not
        "epochs": 90,
        "per_gpu_batch": 32,
        "allreduce": "size_switched",
        "fusion_threshold_mb": 0.5,
        "size_switch_kb": 1024,
    },
)
