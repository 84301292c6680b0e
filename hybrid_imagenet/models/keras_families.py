"""Lists the networks of keras.applications that --model=keras:NAME builds.

Nothing here imports Keras, so that a wrong name ends a run before TensorFlow is loaded.
"""

from __future__ import annotations

import dataclasses

from hybrid_imagenet.errors import UserError, did_you_mean

PREFIX = "keras:"


@dataclasses.dataclass(frozen=True)
class KerasFamily:
    """Networks of one module of keras.applications.

    Attributes:
      module: Name of the module, which has the family's `preprocess_input`.
      names: Functions of keras.applications.
      input_range: Pixels as the networks take them, see `keras_network.prepare_images`: `caffe`,
        `tf` or `torch`, the modes of Keras's `preprocess_input`; `pixels`, 0 to 255, for networks
        that begin with their own preprocessing; `efficientnet`.
      min_image_size: The smallest side of an image in pixels that Keras accepts.
    """

    module: str
    names: tuple[str, ...]
    input_range: str
    min_image_size: int = 32


FAMILIES = (
    KerasFamily(
        "convnext",
        ("ConvNeXtTiny", "ConvNeXtSmall", "ConvNeXtBase", "ConvNeXtLarge", "ConvNeXtXLarge"),
        "pixels",
    ),
    KerasFamily("densenet", ("DenseNet121", "DenseNet169", "DenseNet201"), "torch"),
    KerasFamily(
        "efficientnet", tuple(f"EfficientNetB{number}" for number in range(8)), "efficientnet"
    ),
    KerasFamily(
        "efficientnet_v2",
        (
            "EfficientNetV2B0",
            "EfficientNetV2B1",
            "EfficientNetV2B2",
            "EfficientNetV2B3",
            "EfficientNetV2S",
            "EfficientNetV2M",
            "EfficientNetV2L",
        ),
        "pixels",
    ),
    KerasFamily("inception_resnet_v2", ("InceptionResNetV2",), "tf", 75),
    KerasFamily("inception_v3", ("InceptionV3",), "tf", 75),
    KerasFamily("mobilenet", ("MobileNet",), "tf"),
    KerasFamily("mobilenet_v2", ("MobileNetV2",), "tf"),
    KerasFamily("mobilenet_v3", ("MobileNetV3Small", "MobileNetV3Large"), "pixels"),
    KerasFamily("nasnet", ("NASNetMobile", "NASNetLarge"), "tf"),
    KerasFamily("resnet", ("ResNet50", "ResNet101", "ResNet152"), "caffe"),
    KerasFamily("resnet_v2", ("ResNet50V2", "ResNet101V2", "ResNet152V2"), "tf"),
    KerasFamily("vgg16", ("VGG16",), "caffe"),
    KerasFamily("vgg19", ("VGG19",), "caffe"),
    KerasFamily("xception", ("Xception",), "tf", 71),
)

_FAMILY_BY_NAME = {name: family for family in FAMILIES for name in family.names}
NAMES = tuple(_FAMILY_BY_NAME)


def is_keras_network(model: str) -> bool:
    """Returns whether a value of --model is keras:NAME, with a valid name or not."""
    return model.startswith(PREFIX)


def is_user_function(model: str) -> bool:
    """Returns whether a value of --model is MODULE:FUNCTION."""
    return ":" in model and not is_keras_network(model)


def family_of(model: str) -> KerasFamily:
    """Returns the family of keras:NAME.

    Raises:
      UserError: If keras.applications has no network with this name.
    """
    name = model.removeprefix(PREFIX)
    if name in _FAMILY_BY_NAME:
        return _FAMILY_BY_NAME[name]
    spellings = {known.lower(): known for known in NAMES}
    if name.lower() in spellings:
        suggestion = f" (did you mean {PREFIX}{spellings[name.lower()]}?)"
    else:
        suggestion = did_you_mean(name, NAMES, PREFIX)
    raise UserError(
        f"--model={model}: keras.applications has no network {name!r}{suggestion}. After"
        f" {PREFIX}, choose one of {', '.join(NAMES)}."
    )


def check_image_size(model: str, image_size: int) -> None:
    """Raises UserError if images are smaller than keras:NAME accepts, or the name is unknown."""
    smallest = family_of(model).min_image_size
    if image_size < smallest:
        raise UserError(
            f"--image_size={image_size}: {model} needs at least {smallest} pixels. Set"
            f" --image_size={smallest} or more."
        )
