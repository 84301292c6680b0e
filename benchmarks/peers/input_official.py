"""Reads with the usual TensorFlow ResNet input, in plain tf.data calls.

It has a distorted box, fused decode and crop, flip, resize and mean subtraction, all on the host in
FP32.

Arguments: image directory, shard directory, batch, threads, seconds, image size. Prints one line of
JSON.
"""

import json
import sys
import time
from pathlib import Path

import tensorflow as tf

MEAN = [123.68, 116.78, 103.94]


def parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The encoded image and the label from 0."""
    features = tf.io.parse_single_example(
        record,
        {
            "image/encoded": tf.io.FixedLenFeature([], tf.string),
            "image/class/label": tf.io.FixedLenFeature([], tf.int64),
        },
    )
    return features["image/encoded"], tf.cast(features["image/class/label"], tf.int32) - 1


def preprocess(content: tf.Tensor, label: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """One FP32 image with the mean subtracted."""
    begin, extent, _ = tf.image.sample_distorted_bounding_box(
        tf.image.extract_jpeg_shape(content),
        bounding_boxes=tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
        min_object_covered=0.1,
        aspect_ratio_range=[0.75, 1.33],
        area_range=[0.08, 1.0],
        max_attempts=100,
        use_image_if_no_bounding_boxes=True,
    )
    window = tf.stack([begin[0], begin[1], extent[0], extent[1]])
    image = tf.image.decode_and_crop_jpeg(content, window, channels=3)
    image = tf.image.random_flip_left_right(image)
    image = tf.image.resize(image, [size, size], method="bilinear")
    return image - tf.constant(MEAN), label


def main(shards: str, batch: int, threads: int, seconds: float, size: int) -> None:
    """Measures for some seconds and prints the result."""
    files = tf.data.Dataset.from_tensor_slices(
        sorted(str(path) for path in Path(shards).glob("train-*-of-*"))
    )
    dataset = (
        files.shuffle(64)
        .repeat()
        .interleave(tf.data.TFRecordDataset, cycle_length=10, num_parallel_calls=threads)
    )
    dataset = dataset.prefetch(batch).shuffle(500)
    dataset = dataset.map(parse, num_parallel_calls=threads)
    dataset = dataset.map(
        lambda content, label: preprocess(content, label, size), num_parallel_calls=threads
    )
    dataset = dataset.batch(batch, drop_remainder=True).prefetch(2)
    options = tf.data.Options()
    options.threading.private_threadpool_size = threads
    options.deterministic = False
    elements = iter(dataset.with_options(options))
    for _ in range(3):
        next(elements)
    images, cpu, start = 0, time.process_time(), time.perf_counter()
    while time.perf_counter() - start < seconds:
        next(elements)
        images += batch
    elapsed = time.perf_counter() - start
    print(
        json.dumps({"images": images, "seconds": elapsed, "cpu_seconds": time.process_time() - cpu})
    )


if __name__ == "__main__":
    main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), int(sys.argv[6]))
