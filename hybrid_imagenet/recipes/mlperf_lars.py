"""MLPerf's LARS reference at any batch.

Learning rate, warmup, momentum, weight decay and epochs follow from MLPerf's table for the batch.

Command (8 GPUs with 256 images each, 2,048 images per step):

    hybrid-imagenet run -np 8 -- --recipe=mlperf_lars --data_dir=DIR

Published: 75.9 % top-1 after 35 epochs at batch 1,632, 40 at 4,096, 56 at 32,768 and 85 at 65,536.
"""

from hybrid_imagenet.recipes import Recipe

RECIPE = Recipe(
    name="mlperf_lars",
    summary="LARS; learning rate, warmup, momentum, decay and epochs follow from the batch",
    source="MLPerf Training, reference convergence points for ResNet-50 (rcps_resnet.json 4.0.0)",
    hardware="many systems",
    published="75.9 % top-1 after 35 epochs at batch 1632, 40 at 4096, 56 at 32768, 85 at 65536",
    overrides={
        "optimizer": "lars",
        "lr_schedule": "mlperf",
        "label_smoothing": 0.1,
        "augmentation": "inception",
        "batch_norm": "moving",
        "eval_every_epochs": 4,
    },
)
