"""Trains in a loop without `fit`, with LARS.

hybrid-imagenet run -np 2 examples/custom_loop.py --steps=100
"""

import argparse

import hybrid_imagenet as hi

# Call this before importing Keras, because it assigns this rank its GPU and threads.
hi.init()

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402


def main() -> None:
    """Trains --steps steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    (pixels, digits), _ = hi.data.digits()
    pixels = pixels.reshape(-1, 64).astype("float32") / 16
    shard = hi.data.shard((pixels, digits), hi.rank(), hi.size())
    dataset = tf.data.Dataset.from_tensor_slices(shard)
    batches = dataset.shuffle(2000, seed=hi.rank()).repeat().batch(64)

    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10)]
    )
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    lars = hi.optimizers.LARS(learning_rate=0.5 * hi.size(), trust_coefficient=0.01)
    optimizer = hi.DistributedOptimizer(lars)
    model.compile(optimizer)
    # All ranks start with the weights of rank 0. Without this call the first step raises an error.
    hi.broadcast_model(model)

    @tf.function
    def step(x, y):
        """Takes one step on all ranks; returns the loss of this rank."""
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
            # In FP16 this keeps small gradients from becoming zero. Other types need no scale.
            scaled_loss = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled_loss, model.trainable_variables)
        # This averages gradients over ranks and removes the scale. If a gradient is not finite, it
        # skips the update.
        optimizer.apply(gradients)
        return loss

    for number, (x, y) in enumerate(batches.take(max(options.steps, 1))):
        loss = step(x, y)
        if hi.rank() == 0 and number % 20 == 0:
            print(f"step {number}: loss {float(loss):.3f}")
    mean = hi.communicator().allreduce_sum(loss, "last_loss") / hi.size()
    if hi.rank() == 0:
        print(f"last loss over {hi.size()} ranks: {float(mean):.3f}")


if __name__ == "__main__":
    main()
