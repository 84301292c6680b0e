"""Trains a new head on a saved model, and then the whole network, to recognize odd digits.

    hybrid-imagenet run -np 2 examples/fine_tune.py digits.keras

The first argument is a model that `keras_fit.py --save` has written, or another one. Its last layer
is replaced.
"""

import argparse

import hybrid_imagenet as hi

# Call this before importing Keras, because it assigns this rank its GPU and threads.
hi.init()

import keras  # noqa: E402


def main() -> None:
    """Trains the head, then the whole network, and prints the accuracy."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "model", help="a .keras file; every rank may read it, and rank 0's weights count"
    )
    parser.add_argument("--epochs", type=int, default=3, help="epochs of each stage")
    options = parser.parse_args()

    (pixels, digits), (test_pixels, test_digits) = hi.data.digits()
    pixels = pixels[..., None].astype("float32") / 16
    test_pixels = test_pixels[..., None].astype("float32") / 16
    x, y = hi.data.shard((pixels, digits % 2), hi.rank(), hi.size())
    test = hi.data.shard((test_pixels, test_digits % 2), hi.rank(), hi.size(), remainder="keep")

    body = hi.load_model(options.model, compile=False)
    features = keras.Model(body.inputs, body.layers[-2].output)
    model = keras.Sequential([features, keras.layers.Dense(2, name="odd")])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    for stage, trains_all, learning_rate in (("head", False, 1e-2), ("all", True, 1e-4)):
        # A frozen layer sends no gradient, and its batch statistics do not change.
        features.trainable = trains_all
        # A change of `trainable` needs a new optimizer, because the old one has the state of other
        # variables.
        optimizer = hi.DistributedOptimizer(keras.optimizers.AdamW(learning_rate=learning_rate))
        model.compile(optimizer, loss=loss, metrics=["accuracy"])
        model.fit(
            x, y, batch_size=30, epochs=options.epochs, callbacks=hi.callbacks.default_callbacks()
        )
        if hi.rank() == 0:
            print(f"{stage}: {len(model.trainable_variables)} variables trained")
    # The results include the test images of all ranks.
    results = hi.evaluate(model, *test, verbose=0)
    if hi.rank() == 0:
        print(f"accuracy on test images: {results['accuracy']:.3f}")


if __name__ == "__main__":
    main()
