"""Reads with NVIDIA DALI's CPU pipeline.

It has a file reader, fused decode and random crop, resize, flip and normalization to FP32.

Arguments: image directory, shard directory, batch, threads, seconds, image size. Prints one line of
JSON.
"""

import json
import sys
import time
from typing import Any

from nvidia.dali import fn, pipeline_def, types


@pipeline_def
def training(directory: str, size: int) -> Any:
    """The graph of one batch: FP32 images and labels."""
    encoded, labels = fn.readers.file(file_root=directory, random_shuffle=True)
    images = fn.decoders.image_random_crop(
        encoded,
        device="cpu",
        output_type=types.RGB,
        random_area=[0.08, 1.0],
        random_aspect_ratio=[0.75, 1.3333],
    )
    images = fn.resize(images, resize_x=size, resize_y=size, interp_type=types.INTERP_LINEAR)
    images = fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT,
        output_layout="HWC",
        mean=[0.485 * 255, 0.456 * 255, 0.406 * 255],
        std=[0.229 * 255, 0.224 * 255, 0.225 * 255],
        mirror=fn.random.coin_flip(),
    )
    return images, labels


def main(directory: str, batch: int, threads: int, seconds: float, size: int) -> None:
    """Measures for some seconds and prints the result."""
    pipeline = training(
        directory,
        size,
        batch_size=batch,
        num_threads=threads,
        device_id=None,
        prefetch_queue_depth=2,
    )
    pipeline.build()
    for _ in range(3):
        pipeline.run()
    images, cpu, start = 0, time.process_time(), time.perf_counter()
    while time.perf_counter() - start < seconds:
        pipeline.run()
        images += batch
    elapsed = time.perf_counter() - start
    print(
        json.dumps({"images": images, "seconds": elapsed, "cpu_seconds": time.process_time() - cpu})
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), int(sys.argv[6]))
