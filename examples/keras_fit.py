"""Trains a small convolutional network on handwritten digits, with any number of ranks.

    hybrid-imagenet run -np 2 examples/keras_fit.py --epochs=8 --save=digits.keras

Every rank runs this file. Numbered comments mark the differences from a program for one GPU.
"""

import argparse

import hybrid_imagenet as hi

# 1. Call this before importing Keras, because it assigns this rank its GPU and threads.
hi.init()

import keras  # noqa: E402


def network() -> keras.Model:
    """Returns two convolutions with batch normalization, and logits of ten classes."""
    model = keras.Sequential([keras.Input((8, 8, 1))])
    for width in (16, 32):
        model.add(keras.layers.Conv2D(width, kernel_size=3, padding="same", use_bias=False))
        model.add(keras.layers.BatchNormalization())
        model.add(keras.layers.ReLU())
        model.add(keras.layers.MaxPooling2D())
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dense(10))
    return model


def main() -> None:
    """Trains, and saves the model with --save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--save", help="file for the trained model")
    options = parser.parse_args()

    (x_train, y_train), (x_test, y_test) = hi.data.digits()
    x_train = x_train[..., None].astype("float32") / 16
    x_test = x_test[..., None].astype("float32") / 16
    # 2. Each rank trains on a shard of the data. All shards have the same length.
    x, y = hi.data.shard((x_train, y_train), hi.rank(), hi.size())
    validation = hi.data.shard((x_test, y_test), hi.rank(), hi.size(), remainder="keep")

    model = network()
    # 3. The learning rate is for the batch of all ranks, so the schedule warms up to it.
    schedule = hi.schedules.cosine(peak=0.05 * hi.size(), epochs=options.epochs, warmup_epochs=1)
    # 4. The optimizer averages gradients over ranks.
    optimizer = hi.DistributedOptimizer(hi.optimizers.SGD(momentum=0.9), schedule=schedule)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"])
    # 5. These callbacks give all ranks the same weights, and average metrics over ranks.
    callbacks = hi.callbacks.default_callbacks()
    model.fit(
        x, y, batch_size=30, epochs=options.epochs, validation_data=validation, callbacks=callbacks
    )
    # 6. Only one rank writes the file.
    if options.save and hi.rank() == 0:
        model.save(options.save)


if __name__ == "__main__":
    main()
