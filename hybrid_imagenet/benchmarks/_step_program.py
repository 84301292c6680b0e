"""Implementation: this package's ResNet."""

import keras
import tensorflow as tf

from hybrid_imagenet import models
from hybrid_imagenet.benchmarks._step_protocol import serve, settings
from hybrid_imagenet.benchmarks._step_tensorflow import batch_of, limit_threads, training_step


def main() -> None:
    """Builds the model and serves steps."""
    options = settings()
    limit_threads(options)
    model = models.create(
        options["model"],
        options["num_classes"],
        options["image_size"],
        width=options["width"],
        stem=options["stem"],
        precision=options["precision"],
    )
    images, labels = batch_of(options)
    step = training_step(model, images, labels, model.input.dtype)
    serve(step, name="hybrid_imagenet", version=f"tensorflow {tf.__version__}, keras {keras.__version__}")


main()
