"""Reads with Pillow, by the steps of torchvision's ImageFolder training input.

These are: open and convert to RGB, random resized crop (bilinear, antialiased), flip, conversion to
FP32 planes, normalization. There is one process per worker, and NumPy arrays replace tensors.

Arguments: image directory, shard directory, batch, threads, seconds, image size. Prints one line of
JSON.
"""

import json
import math
import multiprocessing
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

MEAN = np.array([0.485, 0.456, 0.406], np.float32)[:, None, None]
STD = np.array([0.229, 0.224, 0.225], np.float32)[:, None, None]


def window(width: int, height: int) -> tuple[int, int, int, int]:
    """A random window (left, top, right, bottom) as torchvision draws it."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        aspect = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            x, y = random.randint(0, width - w), random.randint(0, height - h)
            return x, y, x + w, y + h
    side = min(width, height)
    x, y = (width - side) // 2, (height - side) // 2
    return x, y, x + side, y + side


def load(path: Path, size: int) -> np.ndarray:
    """One image as normalized FP32 planes."""
    with open(path, "rb") as file:
        image: Image.Image = Image.open(file).convert("RGB")
    image = image.crop(window(*image.size)).resize((size, size), Image.Resampling.BILINEAR)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    planes = np.asarray(image).transpose(2, 0, 1).astype(np.float32) / np.float32(255)
    return (planes - MEAN) / STD


def work(
    paths: list[Path], batch: int, seconds: float, size: int, barrier: Any, results: Any
) -> None:
    """Loads batches in one process for some seconds."""
    for path in paths[:batch]:
        load(path, size)
    barrier.wait()
    images, start, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - start < seconds:
        np.stack([load(path, size) for path in random.choices(paths, k=batch)])
        images += batch
    results.put((images, time.perf_counter() - start, time.process_time() - cpu))


def main(directory: str, batch: int, threads: int, seconds: float, size: int) -> None:
    """Measures for some seconds and prints the result."""
    paths = sorted(Path(directory).glob("*/*.JPEG"))
    barrier: Any = multiprocessing.Barrier(threads)
    results: Any = multiprocessing.Queue()
    workers = [
        multiprocessing.Process(target=work, args=(paths, batch, seconds, size, barrier, results))
        for _ in range(threads)
    ]
    for worker in workers:
        worker.start()
    done = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    images, longest = sum(row[0] for row in done), max(row[1] for row in done)
    print(
        json.dumps(
            {"images": images, "seconds": longest, "cpu_seconds": sum(row[2] for row in done)}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), int(sys.argv[6]))
