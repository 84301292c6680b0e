"""A training loop without `fit`: LARS and the loss scale.

hybrid-imagenet run -np 2 examples/custom_loop.py --steps=100
"""

import argparse

import hybrid_imagenet as hi

hi.init()  # before Keras, whose TensorFlow reads this rank's GPU and threads when it starts

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402


def main() -> None:
    """Trains for --steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    (pixels, digits), _ = hi.data.digits()
    pixels = pixels.reshape(-1, 64).astype("float32") / 16
    part = hi.data.shard((pixels, digits), hi.rank(), hi.size())
    batches = (
        tf.data.Dataset.from_tensor_slices(part).shuffle(2000, seed=hi.rank()).repeat().batch(64)
    )

    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10)]
    )
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = hi.DistributedOptimizer(hi.optimizers.LARS(learning_rate=0.5 * hi.size(), eta=0.01))
    model.compile(optimizer)
    hi.broadcast_model(
        model
    )  # all ranks start from rank 0's weights; without it the first step raises an error

    @tf.function
    def step(x, y):
        """One step of all ranks; returns this rank's loss."""
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
            scaled = optimizer.scale_loss(loss)  # gradients are taken of the scaled loss
        optimizer.apply(
            tape.gradient(scaled, model.trainable_variables)
        )  # reduces, unscales, updates or skips
        return loss

    for number, (x, y) in enumerate(batches.take(max(options.steps, 1))):
        loss = step(x, y)
        if hi.rank() == 0 and number % 20 == 0:
            print(
                f"step {number}: loss {float(loss):.3f}, loss scale"
                f" {float(optimizer.loss_scale.scale):g}"
            )
    mean = hi.communicator().allreduce_sum(loss, "last_loss") / hi.size()
    if hi.rank() == 0:
        print(f"last loss over {hi.size()} ranks: {float(mean):.3f}")


if __name__ == "__main__":
    main()
