"""Networks of one's own, for `--model=MODULE:FUNCTION`."""

import keras


def small(num_classes, image_size, **options):
    """A convolution with `options`, Keras's own batch normalization and a layer of scores."""
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


def wrong(num_classes, image_size):
    """Too many scores."""
    return small(num_classes + 1, image_size)


def with_softmax(num_classes, image_size):
    """Probabilities, in a model within a model."""
    inner = keras.Sequential([small(num_classes, image_size), keras.layers.Activation("softmax", name="last")])
    return keras.Sequential([keras.Input((image_size, image_size, 3)), inner])


def synchronized(num_classes, image_size):
    """Normalization over ranks."""
    norm = keras.layers.BatchNormalization(synchronized=True)
    return keras.Sequential([keras.Input((image_size, image_size, 3)), norm, small(num_classes, image_size)])


def regularized(num_classes, image_size):
    """A weight has a loss of its own."""
    return small(num_classes, image_size, kernel_regularizer="l2")


def without_arguments():
    """Takes nothing."""
