"""Hybrid gradient computing on cluster 2 of Lu et al.

GPUs without fast FP16 compute in FP32. Gradients are sent in FP16.

Command (24 GPUs, 3,072 images per step):

    hybrid-imagenet run -np 24 -H HOSTS -- --recipe=hybrid_p40 --data_dir=DIR

Published: 75.58 % top-1 and 6,903 images/s on 6 x 4 P40 with 40 Gbit/s RoCE. The printed time of
108 min for 90 epochs contradicts the printed speed, with which 90 epochs take 278 min.
"""

from hybrid_imagenet.recipes import Recipe

RECIPE = Recipe(
    name="hybrid_p40",
    summary="hybrid for GPUs without fast FP16: FP32 computation, FP16 communication",
    source="Lu, Lu, Liang, hybrid gradient computing, 3.1 and 3.2",
    hardware="6 x 4 P40, 40 Gbit/s RoCE",
    published="75.58 % top-1; 6,903 images/s",
    overrides={
        "per_gpu_batch": 128,
        "precision": "float32",
    },
)
