"""Small models and data on which `fit` with several ranks and Keras alone can be compared."""

import keras
import numpy as np

BATCH = 4  # of one rank
STEPS = 4


class OwnStep(keras.Model):
    """A model with a `train_step` of its own, as Keras's guide has it; it also counts its steps."""

    def train_step(self, data):
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        grads = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"own_loss": loss}


def plain(seed):
    """Two dense layers."""
    layers = keras.layers
    init = [keras.initializers.GlorotUniform(seed + i) for i in range(2)]
    first = layers.Dense(5, "tanh", kernel_initializer=init[0])
    return keras.Sequential([keras.Input((6,)), first, layers.Dense(3, kernel_initializer=init[1], dtype="float32")])


def rich(seed):
    """Two outputs, a frozen layer, LayerNormalization, GroupNormalization."""
    layers = keras.layers
    init = [keras.initializers.GlorotUniform(seed + i) for i in range(4)]
    inputs = keras.Input((6,))
    hidden = layers.Dense(8, kernel_initializer=init[0], trainable=False, name="frozen")(inputs)
    hidden = layers.LayerNormalization(name="layer_norm")(hidden)
    hidden = layers.GroupNormalization(2, name="group_norm")(layers.Dense(8, kernel_initializer=init[1])(hidden))
    one = layers.Dense(3, kernel_initializer=init[2], name="one", dtype="float32")(hidden)
    other = layers.Dense(3, kernel_initializer=init[3], name="other", dtype="float32")(hidden)
    return keras.Model(inputs, [one, other])


def words(seed):
    """An embedding, whose gradient is sparse."""
    layers = keras.layers
    table = layers.Embedding(7, 5, embeddings_initializer=keras.initializers.RandomUniform(seed=seed))
    last = layers.Dense(3, kernel_initializer=keras.initializers.GlorotUniform(seed + 1), dtype="float32")
    return keras.Sequential([keras.Input((4,), dtype="int32"), table, layers.Flatten(), last])


def own_step(seed):
    """The two dense layers in a model with its own step."""
    inner = plain(seed)
    return OwnStep(inner.inputs, inner.outputs)


MODELS = {"plain": plain, "rich": rich, "words": words, "own_step": own_step}


def data(model, size):
    """Inputs, targets and sample weights for STEPS steps of `size` ranks."""
    random = np.random.default_rng(5)
    count = BATCH * STEPS * size
    if model == "words":
        x = random.integers(0, 7, (count, 4)).astype(np.int32)
    else:
        x = random.normal(size=(count, 6)).astype(np.float32)
    y = random.integers(0, 3, count).astype(np.int32)
    weights = random.uniform(0.5, 1.5, count).astype(np.float32)
    return x, ((y, (y + 1) % 3) if model == "rich" else y), weights


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compile_model(model, optimizer, **arguments):
    several = len(model.outputs) > 1
    model.compile(optimizer, [loss(), loss()] if several else loss(), **arguments)


def alone(case):
    """The weights after training with Keras alone, eagerly and in float32, on the batches of all ranks together."""
    size, name = case["size"], case["model"]
    model = MODELS[name](3)
    x, y, weights = data(name, size)
    compile_model(model, optimizer(case), run_eagerly=True)
    batch = BATCH * size * case.get("accumulate", 1)
    model.fit(x, y, batch, shuffle=False, verbose=0, sample_weight=weights if case.get("weights") else None)
    return [w.astype(float).ravel().tolist() for w in model.get_weights()]


def optimizer(case, **arguments):
    """Keras's own optimizer of a case."""
    if case.get("inner") == "adamw":
        return keras.optimizers.AdamW(0.01, **arguments)
    # Keras's momentum treats rows of an embedding without a gradient in its own way.
    return keras.optimizers.SGD(0.1, momentum=0.0 if case["model"] == "words" else 0.9, **arguments)
