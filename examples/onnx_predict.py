"""Classifies images with an ONNX file, without TensorFlow and without this package.

    hybrid-imagenet export runs/NAME --best --to=network.onnx
    python examples/onnx_predict.py network.onnx cat.jpg dog.png

It needs only ONNX Runtime, Pillow and NumPy, and gives the network the same pixels as
`hybrid-imagenet predict`. docs/export.md lists the exceptions.
"""

import argparse
import json

import numpy as np
import onnxruntime
from PIL import Image, ImageChops


def main() -> None:
    """Prints the five most probable classes of each image."""
    parser = argparse.ArgumentParser()
    parser.add_argument("network", help="a file that `hybrid-imagenet export` has written")
    parser.add_argument("images", nargs="+", help="image files")
    options = parser.parse_args()

    session = onnxruntime.InferenceSession(options.network, providers=["CPUExecutionProvider"])
    metadata = session.get_modelmeta().custom_metadata_map
    class_names = json.loads(metadata["class_names"])
    for path in options.images:
        pixels = load_pixels(path, int(metadata["image_size"]), float(metadata["crop_fraction"]))
        (logits,) = session.run(["logits"], {"image": pixels[None]})
        probabilities = np.exp(logits[0] - logits[0].max())
        probabilities /= probabilities.sum()
        print(path)
        for index in probabilities.argsort()[::-1][:5]:
            print(f"{probabilities[index]:6.1%}  {class_names[index]}")


def load_pixels(path: str, size: int, crop_fraction: float) -> np.ndarray:
    """Returns the part of an image that the network sees.

    Args:
      path: The image file.
      size: `image_size` in the metadata, in pixels.
      crop_fraction: `crop_fraction` in the metadata.

    Returns:
      RGB pixels of 0 to 255, float32 [size, size, 3].
    """
    image = Image.open(path)
    # Take the central square of the shorter side.
    side = round(crop_fraction * min(image.size))
    left = (image.width - side) // 2
    top = (image.height - side) // 2

    # Reduce large images first: JPEGs while they are decoded, others by the mean of blocks.
    ratio = max(r for r in (1, 2, 4, 8) if r == 1 or side >= r * size)
    left //= ratio
    top //= ratio
    side //= ratio
    if image.format in ("JPEG", "MPO"):
        image.draft("RGB", (image.width // ratio, image.height // ratio))
        ratio = 1
    box = tuple(ratio * edge for edge in (left, top, left + side, top + side))
    square = np.asarray(to_rgb(image).crop(box).reduce(ratio), np.float32)

    # Interpolate bilinearly between the centers of pixels, without smoothing, then round.
    positions = (np.arange(size, dtype=np.float32) + 0.5) * (side / size) - 0.5
    positions = positions.clip(0, side - 1)
    low = positions.astype(int)
    high = np.minimum(low + 1, side - 1)
    fraction = (positions - np.floor(positions))[:, None]
    columns = square[:, low] + (square[:, high] - square[:, low]) * fraction
    pixels = columns[low] + (columns[high] - columns[low]) * fraction[:, None]
    return np.floor(pixels + 0.5)


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts an image to RGB as TensorFlow's decoder does."""
    if image.mode.startswith("I"):
        # Gray of 16 bits. Pillow would clip it at 255 instead of taking the upper 8 bits.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode == "CMYK" and "adobe" not in image.info:
        # Only programs of Adobe store inverted colors, but Pillow inverts them always.
        image = ImageChops.invert(image)
    elif image.format == "GIF" and "transparency" in image.info:
        # The decoder shows transparent pixels of a GIF in black, those of other formats as stored.
        image = Image.alpha_composite(Image.new("RGBA", image.size, "black"), image.convert("RGBA"))
    return image.convert("RGB")


if __name__ == "__main__":
    main()
