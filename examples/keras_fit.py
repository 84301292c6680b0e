"""Trains a small convolutional network on scikit-learn's handwritten digits, with any number of ranks.

    horovodrun -np 2 python examples/keras_fit.py --epochs 8 --save digits.keras

Every rank runs this file. What differs from a program for one GPU is marked with a number.
"""

import argparse

import hybrid_imagenet as hi

hi.init()  # 1: before Keras; gives this rank a GPU and threads of its own

import keras  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--save", help="file for the trained model")
options = parser.parse_args()

pixels, digits = load_digits(return_X_y=True)
pixels = pixels.reshape(-1, 8, 8, 1).astype("float32") / 16
x, y = hi.data.shard((pixels[:1500], digits[:1500]), hi.rank(), hi.size())  # 2: each rank its share, equally long
held_out = hi.data.shard((pixels[1500:], digits[1500:]), hi.rank(), hi.size(), remainder="keep")

model = keras.Sequential([keras.Input((8, 8, 1))])
for width in (16, 32):
    model.add(keras.layers.Conv2D(width, 3, padding="same", use_bias=False))
    model.add(keras.layers.BatchNormalization())
    model.add(keras.layers.ReLU())
    model.add(keras.layers.MaxPooling2D())
model.add(keras.layers.Flatten())
model.add(keras.layers.Dense(10))

# 3: the learning rate is for the batch of all ranks; the schedule warms up to it
schedule = hi.schedules.cosine(peak=0.05 * hi.size(), epochs=options.epochs, warmup_epochs=1)
optimizer = hi.DistributedOptimizer(hi.optimizers.SGD(momentum=0.9), schedule=schedule)  # 4
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(x, y, 30, options.epochs, validation_data=held_out, callbacks=hi.callbacks.default_callbacks())  # 5
if options.save and hi.rank() == 0:  # 6: one rank writes
    model.save(options.save)
