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


class Holder(keras.Model):
    """Holds built models and has no `call`, so that it is never built itself; its step trains one of them."""

    def __init__(self, teacher, student):
        super().__init__()
        self.teacher, self.student = teacher, student

    def train_step(self, data):
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self.student(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        variables = self.student.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))
        return {"loss": loss}


class Rivals(keras.Model):
    """Two built models with an optimizer each, as the GANs of Keras's examples have them; it is never built itself."""

    def __init__(self, seed):
        super().__init__()
        layers, init = keras.layers, keras.initializers.GlorotUniform
        first = layers.Dense(6, kernel_initializer=init(seed))
        self.maker = keras.Sequential([keras.Input((2,)), first, layers.BatchNormalization(name="bn")])
        self.critic = keras.Sequential([keras.Input((6,)), layers.Dense(1, kernel_initializer=init(seed + 1))])

    def compile(self, maker, critic, **arguments):
        super().compile(**arguments)
        self.maker_optimizer, self.critic_optimizer = maker, critic

    def train_step(self, real):
        import tensorflow as tf

        for model, optimizer, sign in ((self.critic, self.critic_optimizer, 1), (self.maker, self.maker_optimizer, -1)):
            with tf.GradientTape() as tape:
                made = self.critic(self.maker(real[:, :2], training=True))
                loss = sign * tf.reduce_mean(tf.tanh(made) - tf.tanh(self.critic(real)))
                scaled = optimizer.scale_loss(loss)
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))
        return {"loss": loss}


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


def held(seed):
    """The two dense layers in a model that is never built, beside another that must not change."""
    return Holder(plain(seed + 2), plain(seed))


MODELS = {"plain": plain, "rich": rich, "words": words, "own_step": own_step, "held": held}


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
    several = len(getattr(model, "outputs", [])) > 1
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
