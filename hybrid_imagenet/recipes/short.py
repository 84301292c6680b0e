"""A short training: MosaicML's run in MLPerf's open division.

Command (8 GPUs, 2,048 images per step):

    hybrid-imagenet run -np 8 -- --recipe=short --data_dir=DIR

Published: 76.1 % top-1 in 23.8 min on 8 A100, at epoch 27 of 28.

MosaicML's configuration multiplies 90 epochs by 0.32, which their library (composer 0.7) rounds
down to 28. It does not shorten the 8 epochs of warmup. Learning rate 2.048 and weight decay 5e-4
belong to 2,048 images; here both follow the batch. Images grow from epoch 12 on, and have the same
multiple of 4 pixels as theirs in each epoch. Half of the averaged weights comes from the last 100
steps.

Two things differ from theirs. Their scales of normalization begin at random between 0 and 1; here
they begin at 1, and at 0 in the last normalization of a block. They average the statistics of
normalization together with the weights; here the statistics are measured with the averaged weights.
"""

from hybrid_imagenet.recipes import Recipe

RECIPE = Recipe(
    name="short",
    summary=(
        "SGD, sigmoid loss, BlurPool, averaged weights, decoupled decay, 88 to 176 pixels,"
        " validated at 224"
    ),
    source="MLPerf Training 2.0, open division, MosaicML, 8xA100_80GB-methods (config.yaml)",
    hardware="8 A100, batch 2048",
    published="76.1 % top-1 in 23.8 min, at epoch 27 of 28",
    overrides={
        "optimizer": "sgd",
        "per_gpu_batch": 256,
        "epochs": 28,
        "lr": 0.256,
        "lr_scaling": "batch",
        "lr_schedule": "cosine",
        "warmup_epochs": 8.0,
        "warmup_start_lr": 0.0,
        "momentum": 0.875,
        "weight_decay": 6.25e-5,
        "decay_all": True,
        "decoupled_decay": True,
        "loss": "sigmoid",
        "label_smoothing": 0.08,
        "blurpool": True,
        "ema_decay": 0.993092,
        "ema_every": 20,
        "image_size": 176,
        # Epoch:pixels.
        "image_size_schedule": (
            *("0:88", "12:96", "13:104", "14:112", "15:116", "16:124", "17:132"),
            *("18:140", "19:148", "20:156", "21:164", "22:172", "23:176"),
        ),
        # Validation images are resized to 232 pixels and cropped to 224.
        "eval_image_size": 224,
        "eval_crop": 224 / 232,
        "eval_every_epochs": 3,
        "augmentation": "inception",
    },
)
