"""User-defined networks for `--model=MODULE:FUNCTION`."""

import sys

import keras

# The latest network with dropout, for tests that look inside it.
BUILT = []


def small(num_classes, image_size, **options):
    """Returns a convolution with `options`, Keras's batch normalization and a layer of scores."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((image_size, image_size, 3)),
            layers.Conv2D(4, 3, 2, name="first", **options),
            layers.BatchNormalization(name="norm"),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(num_classes, name="scores"),
        ]
    )


def with_dropout(num_classes, image_size):
    """Returns a network with dropout."""
    image = keras.Input((image_size, image_size, 3))
    BUILT[:] = [
        keras.Model(image, keras.layers.Dropout(0.5)(small(num_classes, image_size)(image)))
    ]
    return BUILT[0]


def wrong(num_classes, image_size):
    """Returns a network with one score too many."""
    return small(num_classes + 1, image_size)


def with_softmax(num_classes, image_size):
    """Returns a network that ends with probabilities, inside another model."""
    first = small(num_classes, image_size)
    inner = keras.Model(
        first.inputs, [first.outputs[0], keras.layers.Softmax(name="last")(first.outputs[0])]
    )
    image = keras.Input((image_size, image_size, 3))
    return keras.Model(image, inner(image)[1])


class CustomCall(keras.Model):
    """A model with a custom `call`."""

    def __init__(self, num_classes):
        super().__init__()
        self.scores = keras.layers.Dense(num_classes)

    def call(self, image):
        return self.scores(keras.ops.mean(image, (1, 2)))


def with_logits(num_classes, image_size):
    """Returns a network that contains a model with a custom `call`."""
    image = keras.Input((image_size, image_size, 3))
    return keras.Model(image, CustomCall(num_classes)(image))


def synchronized(num_classes, image_size):
    """Returns a network that normalizes over ranks."""
    norm = keras.layers.BatchNormalization(synchronized=True)
    return keras.Sequential(
        [keras.Input((image_size, image_size, 3)), norm, small(num_classes, image_size)]
    )


def regularized(num_classes, image_size):
    """Returns a network in which one weight has a loss."""
    return small(num_classes, image_size, kernel_regularizer="l2")


def of_another_size(num_classes, image_size):
    """Returns a network for twice the size, because it ignores `image_size`."""
    return small(num_classes, 2 * image_size)


def gray(num_classes, image_size):
    """Returns a network for images with one channel."""
    return keras.Sequential(
        [keras.Input((image_size, image_size, 1)), keras.layers.Flatten(), keras.layers.Dense(3)]
    )


def with_two_inputs(num_classes, image_size):
    """Returns a network with two input images."""
    images = [keras.Input((image_size, image_size, 3)) for _ in range(2)]
    return keras.Model(images, small(num_classes, image_size)(images[0] + images[1]))


def of_any_size(num_classes, image_size):
    """Returns a network for images of any size."""
    image = keras.Input((None, None, 3))
    return keras.Model(
        image, keras.layers.Dense(num_classes)(keras.layers.GlobalAveragePooling2D()(image))
    )


def exits(num_classes, image_size):
    """Exits with code 0 instead of returning a network."""
    sys.exit(0)


def fails(num_classes, image_size):
    """Raises an error instead of returning a network."""
    raise RuntimeError("no weights")


def without_arguments():
    """Takes no arguments, although `--model` passes two."""
