"""A compiled training pass of a network, for comparisons of two forms of it."""

import tensorflow as tf

from hybrid_imagenet.models import normalization


def training_pass(model, images, labels):
    """Returns logits, gradients and statistics by name."""

    @tf.function(autograph=False)
    def run():
        with normalization.deferred_statistics_update(), tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        return logits, tape.gradient(loss, model.trainable_variables)

    logits, gradients = run()
    paths = [v.path for v in model.trainable_variables]
    statistics = {v.path: v.value for v in model.non_trainable_variables}
    return {"logits": logits, **dict(zip(paths, gradients, strict=True)), **statistics}
