"""Published Keras programs, written for one process; only `place` differs on ranks."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.library.models import STEPS
from tests.library.places import EPOCHS, ROUNDED, Place, Program, Result

FROM_LOGITS = {"from_logits": True}


def examples(place: Place, *shapes: tuple[int, ...], seed: int = 5) -> tuple[np.ndarray, ...]:
    """Returns normal random numbers of each shape, for all examples."""
    random = np.random.default_rng(seed)
    return tuple(
        random.normal(size=(place.examples, *shape)).astype(np.float32) for shape in shapes
    )


def dense(inputs: int, *units: int) -> keras.Sequential:
    """Returns a perceptron with tanh activations."""
    hidden = [layers.Dense(number, "tanh") for number in units[:-1]]
    return keras.Sequential([keras.Input((inputs,)), *hidden, layers.Dense(units[-1])])


def fitted(place: Place, model: keras.Model, x, y=None, **arguments) -> Result:
    """Fits a place's share of arrays, without shuffling."""
    x, y = place.share((x, y)) if y is not None else (place.share(x), None)
    callbacks = place.callbacks()
    return model, model.fit(
        x, y, place.batch, EPOCHS, 0, callbacks, shuffle=False, **arguments
    ).history


class Gan(keras.Model):
    """Two models with one optimizer each, which `compile` does not know; it is never built."""

    def __init__(self, norm: bool = False, maker_policy: str = "float32"):
        super().__init__()
        keras.config.set_dtype_policy(maker_policy)
        self.maker = dense(2, 8, 6)
        keras.config.set_dtype_policy("float32")
        if norm:
            self.maker.add(layers.BatchNormalization(name="bn"))
        self.critic = dense(6, 8, 1)

    def compile(self, maker, critic, penalty=0.0, **arguments):
        super().compile(**arguments)
        self.maker_optimizer = maker
        self.critic_optimizer = critic
        self.penalty = penalty

    def train_step(self, data):
        real, noise, mix = (
            data[0] if isinstance(data[0], tuple) else (data, data[:, :2], data[:, :1])
        )
        losses = {}
        for name, model, optimizer in (
            ("critic", self.critic, self.critic_optimizer),
            ("maker", self.maker, self.maker_optimizer),
        ):
            with tf.GradientTape() as tape:
                generated = ops.cast(self.maker(noise, training=True), "float32")
                loss = ops.mean(ops.tanh(self.critic(generated))) - ops.mean(
                    ops.tanh(self.critic(real))
                )
                if name == "critic" and self.penalty:
                    loss += self.penalty * self._steepness(real, generated, mix)
                scaled = optimizer.scale_loss(loss if name == "critic" else -loss)
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))
            losses[f"{name}_loss"] = loss
        return losses

    def _steepness(self, real, generated, mix):
        """Returns the gradient penalty of WGAN-GP."""
        between = generated + ops.sigmoid(mix) * (real - generated)
        with tf.GradientTape() as tape:
            tape.watch(between)
            score = self.critic(between)
        return ops.mean(ops.square(ops.norm(tape.gradient(score, between), axis=1) - 1.0))


def gan(place: Place, penalty: float = 0.0, maker_policy: str = "float32") -> Result:
    model = Gan(maker_policy="float32" if place.alone else maker_policy)
    adam = [
        place.optimizer(keras.optimizers.Adam(0.01, beta_1=0.5, epsilon=1e-3)) for _ in range(2)
    ]
    model.compile(*adam, penalty, **place.compiled())
    return fitted(place, model, examples(place, (6,), (2,), (1,)))


def regression(place: Place, rate: float, *, target: float = 1.0, spikes: bool = False) -> Result:
    """Fits a line to targets of a size, of which every fourth batch may be 100 times larger."""
    (x,) = examples(place, (6,))
    y = target * (x[:, :1] - 2 * x[:, 1:2])
    if spikes:
        y[np.arange(len(y)) // (len(y) // STEPS) == STEPS - 1] *= 100
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1, kernel_initializer="zeros")])
    adam = keras.optimizers.Adam(rate, epsilon=1e-20)
    model.compile(place.optimizer(adam), "mse", **place.compiled())
    return fitted(place, model, x, y)


def residual_network(place: Place) -> Result:
    """Trains a ResNet-8, whose normalizations are synchronized."""

    def normalized(x, filters, stride=1):
        x = layers.Conv2D(filters, 3, stride, "same", use_bias=False)(x)
        return layers.BatchNormalization(synchronized=not place.alone, momentum=0.8)(x)

    inputs = keras.Input((8, 8, 3))
    x = ops.relu(normalized(inputs, 4))
    for filters, stride in ((4, 1), (8, 2), (16, 2)):
        shortcut = x if stride == 1 else normalized(x, filters, stride)
        branch = normalized(ops.relu(normalized(x, filters, stride)), filters)
        x = ops.relu(shortcut + branch)
    model = keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(**FROM_LOGITS)
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(place.optimizer(sgd), loss, **place.compiled())
    (images,) = examples(place, (8, 8, 3))
    return fitted(place, model, images, np.argmax(images[:, 0, 0], axis=1))


class Autoencoder(keras.Model):
    """A variational autoencoder from Keras's examples, whose step is not aware of ranks."""

    def __init__(self):
        super().__init__()
        self.encoder = dense(6, 8, 4)
        self.decoder = dense(2, 8, 6)
        self.total = keras.metrics.Mean("loss")
        self.divergence = keras.metrics.Mean("kl_loss")

    @property
    def metrics(self):
        return [self.total, self.divergence]

    def train_step(self, data):
        x, noise = data[0]
        with tf.GradientTape() as tape:
            mean, log_variance = ops.split(self.encoder(x), 2, axis=1)
            rebuilt = self.decoder(mean + ops.exp(0.5 * log_variance) * noise)
            kl = ops.mean(
                ops.sum(
                    -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance)), axis=1
                )
            )
            loss = ops.mean(ops.sum(ops.square(x - rebuilt), axis=1)) + kl
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total.update_state(loss)
        self.divergence.update_state(kl)
        return {metric.name: metric.result() for metric in self.metrics}


def vae(place: Place) -> Result:
    model = Autoencoder()
    model.compile(place.optimizer(keras.optimizers.Adam(0.01, epsilon=1e-3)), **place.compiled())
    return fitted(place, model, examples(place, (6,), (2,)))


class Distiller(keras.Model):
    """A student that learns from a teacher through `compute_loss`."""

    def __init__(self, teacher, student):
        super().__init__()
        self.teacher = teacher
        self.student = student
        self.teacher.trainable = False

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False):
        soft = ops.softmax(self.teacher(x, training=False) / 3.0)
        distance = keras.losses.kl_divergence(soft, ops.softmax(y_pred / 3.0))
        return 0.1 * super().compute_loss(
            x, y, y_pred, sample_weight, allow_empty
        ) + 8.1 * ops.mean(distance)

    def call(self, x):
        return self.student(x)


def distillation(place: Place) -> Result:
    model = Distiller(dense(6, 16, 3), dense(6, 4, 3))
    loss = keras.losses.SparseCategoricalCrossentropy(**FROM_LOGITS)
    model.compile(
        place.optimizer(keras.optimizers.Adam(0.01)), loss, metrics=["accuracy"], **place.compiled()
    )
    (x,) = examples(place, (6,))
    return fitted(place, model, x, np.argmax(x[:, :3], axis=1))


def pairs(place: Place) -> Result:
    """Fits Siamese towers with the contrastive loss of each pair (Hadsell et al. 2006)."""
    tower = dense(6, 8, 4)
    inputs = [keras.Input((6,)), keras.Input((6,))]
    one, other = map(tower, inputs)
    distance = ops.sqrt(ops.sum(ops.square(one - other), axis=1, keepdims=True) + 1e-3)
    model = keras.Model(inputs, distance)

    def contrastive(y, d):
        return ops.mean((1 - y) * ops.square(d) + y * ops.square(ops.maximum(1 - d, 0)), axis=-1)

    model.compile(place.optimizer(keras.optimizers.RMSprop(0.01)), contrastive, **place.compiled())
    a, b = examples(place, (6,), (6,))
    return fitted(place, model, (a, b), (a[:, :1] > b[:, :1]).astype(np.float32))


class Contrast(keras.Model):
    """SimCLR's loss (Chen et al. 2020), where all other examples of the batch are negatives."""

    def __init__(self):
        super().__init__()
        self.encoder = dense(6, 8, 4)

    def train_step(self, data):
        views = data[0]
        with tf.GradientTape() as tape:
            one, other = (ops.normalize(self.encoder(view), axis=1) for view in views)
            logits = ops.matmul(one, ops.transpose(other)) / 0.5
            numbers = ops.arange(ops.shape(logits)[0])
            loss = ops.mean(
                keras.losses.sparse_categorical_crossentropy(numbers, logits, from_logits=True)
            )
            scaled = self.optimizer.scale_loss(loss)
        variables = self.encoder.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        return {"loss": loss}


def simclr(place: Place) -> Result:
    model = Contrast()
    model.compile(place.optimizer(keras.optimizers.SGD(0.1, momentum=0.9)), **place.compiled())
    return fitted(place, model, examples(place, (6,), (6,)))


class OwnStep(keras.Model):
    """A model with the `train_step` of Keras's guide."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
            scaled = self.optimizer.scale_loss(loss)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


def own_step(place: Place, policy: str = "float32", **compiled) -> Result:
    keras.config.set_dtype_policy("float32" if place.alone else policy)
    inner = dense(6, 8, 1)
    model = OwnStep(inner.inputs, inner.outputs)
    sgd = keras.optimizers.SGD(0.05, momentum=0.9)
    # From 2^15 on the first of few steps would be skipped.
    optimizer = place.optimizer(sgd, **({"loss_scale": 1024} if policy == "mixed_float16" else {}))
    model.compile(optimizer, "mse", metrics=["mae"], **place.compiled(**compiled))
    (x,) = examples(place, (6,))
    return fitted(place, model, x, x[:, :1] * x[:, 1:2])


def loop(place: Place) -> Result:
    """Trains as in Keras's guide to training loops: without `fit`."""
    model = dense(6, 8, 3)
    optimizer = place.optimizer(keras.optimizers.Adam(0.01))
    # `places.run` looks for the model's optimizers among its attributes.
    model.optimizer = optimizer
    place.ready(model)
    loss_of = keras.losses.SparseCategoricalCrossentropy(**FROM_LOGITS)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, model.trainable_weights), model.trainable_weights)

    (x,) = examples(place, (6,))
    batches = tf.data.Dataset.from_tensor_slices(place.share((x, np.argmax(x[:, :3], 1)))).batch(
        place.batch
    )
    for _ in range(EPOCHS):
        for x, y in batches:
            step(x, y)
    return model, {}


def on_batches(place: Place) -> Result:
    """Trains with `train_on_batch`."""
    model = dense(6, 8, 1)
    model.compile(place.optimizer(keras.optimizers.SGD(0.05)), "mse", jit_compile=False)
    place.ready(model)
    (x,) = place.share(examples(place, (6,)))
    for start in range(0, len(x), place.batch):
        model.train_on_batch(x[start : start + place.batch], x[start : start + place.batch, :1])
    return model, {}


def sentences(place: Place, words: int, length: int) -> np.ndarray:
    return np.random.default_rng(5).integers(1, words, (place.examples, length)).astype(np.int32)


def transformer(x, heads: int = 2, causal: bool = False):
    """Adds attention and a perceptron, each with a residual and LayerNormalization."""
    width = x.shape[-1]
    x = layers.LayerNormalization()(
        x + layers.MultiHeadAttention(heads, width)(x, x, use_causal_mask=causal)
    )
    return layers.LayerNormalization()(x + layers.Dense(width)(layers.Dense(8, "relu")(x)))


class PositionEmbedding(layers.Layer):
    """Embeds words and their positions."""

    def __init__(self):
        super().__init__()
        self.words = layers.Embedding(11, 8)
        self.positions = layers.Embedding(5, 8)

    def call(self, x):
        return self.words(x) + self.positions(ops.arange(5))


def classified_text(place: Place) -> Result:
    inputs = keras.Input((5,), dtype="int32")
    outputs = layers.Dense(2, "softmax")(
        layers.GlobalAveragePooling1D()(transformer(PositionEmbedding()(inputs)))
    )
    model = keras.Model(inputs, outputs)
    model.compile(
        place.optimizer(keras.optimizers.Adam(0.01, epsilon=1e-3), sparse=True),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        **place.compiled(),
    )
    x = sentences(place, 11, 5)
    return fitted(place, model, x, x[:, 0] % 2, validation_split=0.25)


def next_word(place: Place) -> Result:
    """Trains a small GPT."""
    inputs = keras.Input((None,), dtype="int32")
    hidden = transformer(layers.Embedding(11, 8)(inputs), causal=True)
    model = keras.Model(inputs, layers.Dense(11)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(**FROM_LOGITS)
    optimizer = place.optimizer(keras.optimizers.Adam(0.01, epsilon=1e-3), sparse=True)
    model.compile(optimizer, loss, **place.compiled())
    text = sentences(place, 11, 7)
    return fitted(place, model, text[:, :-1], text[:, 1:])


def forecast(place: Place) -> Result:
    """Trains on windows of a series, with a learning rate schedule of Keras."""
    series = np.sin(np.arange(place.examples + 6) / 3).astype(np.float32)[:, None]
    windows = keras.utils.timeseries_dataset_from_array(
        series[:-6], series[6:], sequence_length=6, sequence_stride=1, batch_size=None
    )
    model = keras.Sequential(
        [
            keras.Input((6, 1)),
            layers.Conv1D(4, 3, activation="relu"),
            layers.GRU(5),
            layers.Dense(1),
        ]
    )
    rate = keras.optimizers.schedules.CosineDecay(0.05, 8)
    model.compile(
        place.optimizer(keras.optimizers.Adam(rate, epsilon=1e-3)), "mse", **place.compiled()
    )
    batches = place.share(windows).batch(place.batch, drop_remainder=True)
    return model, model.fit(batches, epochs=EPOCHS, verbose=0, callbacks=place.callbacks()).history


def tuned(place: Place) -> Result:
    """Trains a new head on a frozen base, then both with a new optimizer."""
    base = dense(6, 8, 8)
    base.trainable = False
    model = keras.Sequential([keras.Input((6,)), base, layers.Dense(1)])
    (x,) = examples(place, (6,))
    for rate in (0.1, 0.01):
        model.compile(
            place.optimizer(keras.optimizers.SGD(rate, momentum=0.9)), "mse", **place.compiled()
        )
        result = fitted(place, model, x, x[:, :1])
        base.trainable = True
    return result


NEGATIVES = "each rank takes its negatives from its own batch"
PROGRAMS = {
    "GAN": Program(gan),
    "GAN with gradient penalty": Program(lambda place: gan(place, 10.0)),
    "GAN in FP16 and FP32": Program(
        lambda place: gan(place, maker_policy="mixed_float16"), 5e-3, ROUNDED
    ),
    "residual network": Program(residual_network),
    "targets of 1e4": Program(lambda place: regression(place, 1e3, target=1e4), 1e-2),
    "targets of 1e-8": Program(
        lambda place: regression(place, 1e-9, target=1e-8), 1e-14, logs=False
    ),
    "rare targets 100 times larger": Program(lambda place: regression(place, 0.1, spikes=True)),
    "variational autoencoder": Program(vae),
    "distillation": Program(distillation),
    "contrastive pairs": Program(pairs),
    "contrast within the batch": Program(simclr, differs=NEGATIVES),
    "own `train_step`": Program(own_step),
    "training loop": Program(loop),
    "`train_on_batch`": Program(on_batches),
    "text classification": Program(classified_text),
    "next word": Program(next_word),
    "time series": Program(forecast),
    "fine-tuning": Program(tuned),
}
