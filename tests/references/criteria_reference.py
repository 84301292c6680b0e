"""Lu et al., section 1 and Tables 3.7 to 3.11, recomputed from the printed numbers.

The times are for epochs of 1.28 million images, as in the paper. PRINTED holds the minutes that its
tables show.
"""

IMAGES = 1_280_000
GPUS = 24

# Each cluster has images/s of one GPU, the printed efficiency, and images/s of all GPUs.
CLUSTER_1 = (1542, 0.975, 36082)
CLUSTER_1_FP32 = (758, 0.977, 17773)
CLUSTER_2 = (295, 0.94, 6903)

# Epochs of cluster 1 and cluster 2, by table.
EPOCHS = {"3.7": (90, 90), "3.8": (32, 33), "3.9": (39, 42)}
PRINTED_MINUTES = {"3.7": (53, 108), "3.8": (18, 39), "3.9": (23, 50)}
PRINTED_GPU_MINUTES = {"3.8": (432, 936), "3.9": (552, 1200)}

# Tables 3.10 and 3.11: printed GPU minutes, and minutes, GPUs and efficiency that give them. The
# efficiency is scaled to 97.5 % (V100) and left alone (P40). S is in its own Tables 5 and 6; the
# inputs of [35] (Yamazaki et al., 2048 V100) and of J's run on 1024 P40 are not in H and are
# inferred from what it prints.
COMPARED = {
    "S": (5251, 2.0, 3456, 0.7408, 0.975),
    "[35]": (1941, 1.2, 2048, 0.77, 0.975),
    "J": (8908, 8.7, 1024, 0.992, 0.992),
}


def minutes(epochs, images_per_second):
    return epochs * IMAGES / images_per_second / 60


def average_single_gpu_minutes(epochs, single_gpu_images_per_second, efficiency):
    """Returns 1 / (convergence rate * single-GPU speed * scaling efficiency).

    The speed is in epochs per minute.
    """
    rate = 1 / epochs
    speed = single_gpu_images_per_second * 60 / IMAGES
    return 1 / (rate * speed * efficiency)
