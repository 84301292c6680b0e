"""Trains handwritten digits with the hybrid method of Lu et al. in `model.fit`.

    hybrid-imagenet run -np 2 examples/fit_hybrid.py
    hybrid-imagenet run -np 2 examples/fit_hybrid.py --optimizer=sgd    # to compare

AdaBound trains for the first --warmup_epochs. Its bounds close at the learning rate of SGD. After
that, SGD with LARS trains, and its learning rate decays exponentially. See docs/hybrid.md.
"""

import argparse

import hybrid_imagenet as hi

# Call this before importing Keras, because it assigns this rank its GPU and threads.
hi.init()

import keras  # noqa: E402


def network() -> keras.Model:
    """Returns two convolutions with batch normalization, and logits of ten classes."""
    model = keras.Sequential([keras.Input((8, 8, 1))])
    for width in (16, 32):
        model.add(keras.layers.Conv2D(width, kernel_size=3, padding="same", use_bias=False))
        # A run of 300 steps is too short for Keras's momentum of 0.99.
        model.add(keras.layers.BatchNormalization(momentum=0.9))
        model.add(keras.layers.ReLU())
        model.add(keras.layers.MaxPooling2D())
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dense(10))
    return model


def optimizer(options: argparse.Namespace) -> keras.optimizers.Optimizer:
    """Returns the hybrid method, or SGD with a linear warmup and the same decay."""
    # The learning rate of SGD grows with the number of ranks (linear scaling).
    peak = options.learning_rate * hi.size()
    if options.optimizer == "sgd":
        schedule = hi.schedules.exponential(
            peak, options.epochs, decay=options.decay, warmup_epochs=options.warmup_epochs
        )
        return hi.DistributedOptimizer(hi.optimizers.SGD(weight_decay=1e-4), schedule=schedule)
    schedule = hi.schedules.hybrid(
        peak, options.epochs, warmup_epochs=options.warmup_epochs, lr_decay=options.decay
    )
    # `fit` sets the trust coefficient of LARS from the batch of all ranks and the learning rate.
    # Pass trust_coefficient=... to set another one. Lu et al. do not print theirs.
    return hi.DistributedOptimizer(hi.optimizers.Hybrid(weight_decay=1e-4), schedule=schedule)


def main() -> None:
    """Trains, and prints the accuracy on held-out images."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", choices=["hybrid", "sgd"], default="hybrid")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument(
        "--warmup_epochs", type=float, default=3, help="length of the warmup (T of Lu et al.)"
    )
    parser.add_argument(
        "--learning_rate", type=float, default=0.1, help="learning rate of SGD for one rank"
    )
    parser.add_argument(
        "--decay", type=float, default=0.7, help="decay per epoch (kappa of Lu et al.)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights")
    options = parser.parse_args()

    keras.utils.set_random_seed(options.seed)
    (x_train, y_train), (x_test, y_test) = hi.data.digits()
    x_train = x_train[..., None].astype("float32") / 16
    x_test = x_test[..., None].astype("float32") / 16
    x, y = hi.data.shard((x_train, y_train), hi.rank(), hi.size())
    validation = hi.data.shard((x_test, y_test), hi.rank(), hi.size(), remainder="keep")

    model = network()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(options), loss=loss, metrics=["accuracy"])
    history = model.fit(
        x,
        y,
        batch_size=30,
        epochs=options.epochs,
        validation_data=validation,
        callbacks=hi.callbacks.default_callbacks(),
        verbose=2,
    )
    if hi.rank() == 0:
        print(f"accuracy on held-out images: {history.history['val_accuracy'][-1]:.3f}")


if __name__ == "__main__":
    main()
