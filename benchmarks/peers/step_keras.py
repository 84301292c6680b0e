"""Serves steps of keras.applications.ResNet50, as Keras 3 ships it."""

import keras
import tensorflow as tf

from benchmarks._step_program import batch_of, training_step
from benchmarks._step_protocol import send, serve, settings


def main() -> None:
    """Builds the model and serves steps."""
    options = settings()
    if (options["model"], options["width"], options["stem"]) != ("resnet50", 64, "imagenet"):
        send(skipped="keras.applications has no such ResNet. Remove keras from --peers.")
        return
    tf.config.threading.set_intra_op_parallelism_threads(options["threads"])
    keras.mixed_precision.set_global_policy(options["precision"])
    size = options["image_size"]
    model = keras.applications.ResNet50(
        weights=None,
        input_shape=(size, size, 3),
        classes=options["num_classes"],
        classifier_activation=None,
    )
    images, labels = batch_of(options)
    step = training_step(model, images, labels, "float32")
    serve(
        step,
        name="keras.applications",
        version=f"tensorflow {tf.__version__}, keras {keras.__version__}",
    )


main()
