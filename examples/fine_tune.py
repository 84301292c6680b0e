"""Trains a new head, then the whole network, on a saved model: here, whether a digit is odd.

    horovodrun -np 2 python examples/fine_tune.py digits.keras

The first argument is a model that `keras_fit.py --save` has written, or any other whose last layer is to be replaced.
"""

import argparse

import hybrid_imagenet as hi

hi.init()

import keras  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("model", help="a .keras file; every rank may read it, and rank 0's weights count")
parser.add_argument("--epochs", type=int, default=3, help="of each of the two parts")
options = parser.parse_args()

pixels, digits = load_digits(return_X_y=True)
pixels = pixels.reshape(-1, 8, 8, 1).astype("float32") / 16
x, y = hi.data.shard((pixels, digits % 2), hi.rank(), hi.size())

body = hi.load_model(options.model, compile=False)
features = keras.Model(body.inputs, body.layers[-2].output)
model = keras.Sequential([features, keras.layers.Dense(2, name="odd")])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

for part, trains_all in (("head", False), ("all", True)):
    features.trainable = trains_all  # a frozen layer sends no gradient; its batch statistics stay as they are
    # A change of `trainable` needs a new optimizer: the old one has state for other variables.
    optimizer = hi.DistributedOptimizer(keras.optimizers.AdamW(1e-4 if trains_all else 1e-2))
    model.compile(optimizer, loss, metrics=["accuracy"])
    history = model.fit(x, y, 30, options.epochs, callbacks=hi.callbacks.default_callbacks())
    if hi.rank() == 0:
        print(f"{part}: {len(model.trainable_variables)} variables trained")
