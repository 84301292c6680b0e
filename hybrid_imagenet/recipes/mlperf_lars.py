"""MLPerf's LARS reference: peak and warmup by batch, polynomial decay of power 2; batch 4096 from 128 GPUs."""

from hybrid_imagenet.recipes import Recipe

RECIPE = Recipe(
    name="mlperf_lars",
    summary="LARS, peak and warmup by batch, polynomial decay",
    source="MLPerf Training, ResNet reference with LARS",
    hardware="many systems; batch 4096 here from 128 GPUs",
    published="75.9 % top-1 after about 40 epochs at batch 4096",
    overrides={
        "optimizer": "lars",
        "lr_schedule": "mlperf",
        "per_gpu_batch": 32,
        "epochs": 42,
        "weight_decay": 0.0002,
        "label_smoothing": 0.1,
        "augmentation": "inception",
        "batch_norm": "moving",
    },
)
