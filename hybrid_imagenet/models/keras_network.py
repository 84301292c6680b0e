"""Builds a network of keras.applications with random weights (--model=keras:NAME)."""

from __future__ import annotations

import keras
import numpy as np

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models import keras_families, user_model
from hybrid_imagenet.models.blocks import Builder

# Mean and standard deviation of each channel, red, green and blue, with which images arrive; they
# are those of `data.device`, for pixels in [0, 1].
_MEAN = np.array([0.485, 0.456, 0.406])
_STANDARD_DEVIATION = np.array([0.229, 0.224, 0.225])
# The means, for pixels of 0 to 255, that `preprocess_input` subtracts in the mode "caffe".
_CAFFE_MEAN = np.array([123.68, 116.779, 103.939])


def create(model: str, num_classes: int, image_size: int | None, builder: Builder) -> keras.Model:
    """Builds keras:NAME with random weights.

    The layer `prepare` at the input turns images that are normalized as for ImageNet into the
    input that the network's family was designed for.

    Args:
      model: `keras:NAME`, one of `keras_families.NAMES`.
      num_classes: Number of class scores.
      image_size: Side of the input in pixels.
      builder: Its precision is Keras's dtype policy during the call, and its seed the global seed.

    Returns:
      A functional model from images [b, image_size, image_size, 3], normalized as for ImageNet, to
      FP32 logits [b, num_classes].

    Raises:
      UserError: If the name does not exist, here or in the installed Keras, or the image is too
        small.
    """
    family = keras_families.family_of(model)
    if image_size is None:
        raise UserError(f"--model={model} needs one image size for all images. Set --image_size.")
    keras_families.check_image_size(model, image_size)
    build = getattr(keras.applications, model.removeprefix(keras_families.PREFIX), None)
    if build is None:
        raise UserError(
            f"--model={model}: Keras {keras.__version__} has no such network. Install a newer"
            " version of Keras."
        )

    def build_on_normalized_images(num_classes: int, image_size: int) -> keras.Model:
        images = prepare_images(builder.images(image_size), family.input_range)
        return build(
            weights=None,
            input_tensor=images,
            input_shape=(image_size, image_size, 3),
            classes=num_classes,
            classifier_activation=None,
        )

    return user_model.build_checked(
        model, build_on_normalized_images, num_classes, image_size, builder
    )


def prepare_images(images: keras.KerasTensor, input_range: str) -> keras.KerasTensor:
    """Adds the layers between normalized images and a network of keras.applications.

    Removing ImageNet's normalization and applying the family's own preprocessing are both linear in
    each channel, so one layer does both. It computes in FP32 in every precision, because pixels of
    0 to 255 would lose digits in a smaller type.

    Args:
      images: [b, s, s, 3], normalized as for ImageNet, of any floating-point type.
      input_range: `caffe` for blue, green and red, 0 to 255, minus ImageNet's mean; `tf` for -1 to
        1; `torch` for images that are normalized as for ImageNet; `pixels` for 0 to 255;
        `efficientnet` for 255 times images that are normalized as for ImageNet.

    Returns:
      FP32 images [b, s, s, 3], or `images` if there is nothing to do.
    """
    if input_range == "torch":
        return images
    if input_range == "efficientnet":
        # EfficientNet begins by dividing by 255, and continues with a normalization that does
        # nothing before it is adapted to a dataset. The factor makes both together return images
        # that are normalized as for ImageNet, as the published networks take them.
        scale = np.full(3, 255.0)
        offset = np.zeros(3)
    else:
        pixel_scale, pixel_offset = _PIXELS_TO_INPUT[input_range]
        scale = 255 * _STANDARD_DEVIATION * pixel_scale
        offset = 255 * _MEAN * pixel_scale + pixel_offset
    images = keras.layers.Rescaling(
        scale.tolist(), offset.tolist(), dtype="float32", name="prepare"
    )(images)
    if input_range == "caffe":
        images = keras.ops.flip(images, axis=-1)
    return images


# Factor and summand that turn pixels of 0 to 255 into each input range.
_PIXELS_TO_INPUT = {
    "pixels": (1.0, np.zeros(3)),
    "tf": (1 / 127.5, np.full(3, -1.0)),
    "caffe": (1.0, -_CAFFE_MEAN),
}
