"""Uses of `compile` and `fit`, one at a time: the rows of docs/keras-compatibility.md."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hybrid_imagenet as hi
from hybrid_imagenet import optimizers
from tests.library.models import STEPS, loss, vectors
from tests.library.places import EPOCHS, ROUNDED, Place, Program, Result
from tests.library.published import own_step

Data = tuple[Any, ...]
Arguments = dict[str, Any]


def weighted(count: int) -> Data:
    return *vectors(count), np.random.default_rng(6).uniform(0.5, 1.5, count).astype(np.float32)


def two_targets(count: int) -> Data:
    x, y = vectors(count)
    return x, (y, (y + 1) % 3)


def tokens(count: int) -> Data:
    random = np.random.default_rng(5)
    words = random.integers(1, 7, (count, 5))
    lengths = random.integers(2, 6, (count, 1))
    # Word 0 is padding.
    x = words * (np.arange(5) < lengths)
    return x.astype(np.int32), random.integers(0, 3, count).astype(np.int32)


def tagged(count: int) -> Data:
    x, _ = tokens(count)
    return x, x % 3


def images(count: int) -> Data:
    return (
        np.random.default_rng(5).normal(size=(count, 6, 6, 2)).astype(np.float32),
        vectors(count)[1],
    )


def dense(
    *further: Callable[[], Any], shape: tuple[int, ...] = (6,), **first: Any
) -> keras.Sequential:
    """Returns a first layer, further layers, and logits of three classes."""
    hidden = [layers.Dense(8, "tanh", **first), *(layer() for layer in further)]
    return keras.Sequential([keras.Input(shape), *hidden, layers.Dense(3, dtype="float32")])


def embedded(*further: Callable[[], Any], mask: bool = False) -> keras.Sequential:
    inputs = keras.Input((5,), dtype="int32")
    return keras.Sequential(
        [inputs, layers.Embedding(7, 4, mask_zero=mask), *(make() for make in further)]
    )


def recurrent(*makes: Callable[[], Any], mask: bool = False) -> keras.Sequential:
    return embedded(*makes, lambda: layers.Dense(3), mask=mask)


def convolved() -> keras.Sequential:
    hidden = [layers.Conv2D(4, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten()]
    return keras.Sequential([keras.Input((6, 6, 2)), *hidden, layers.Dense(3)])


def normalized_over_ranks() -> keras.Sequential:
    """Returns a network that normalizes images and vectors over all ranks."""
    hidden = [
        layers.Conv2D(4, 3),
        layers.BatchNormalization(synchronized=True, momentum=0.8),
        layers.ReLU(),
        layers.Flatten(),
        layers.Dense(6),
        layers.BatchNormalization(synchronized=True, scale=False),
    ]
    return keras.Sequential([keras.Input((6, 6, 2)), *hidden, layers.Dense(3, dtype="float32")])


def two_outputs() -> keras.Model:
    """Returns a network with a frozen layer, layers without statistics and two heads."""
    inputs = keras.Input((6,))
    hidden = layers.LayerNormalization()(layers.Dense(8, trainable=False)(inputs))
    hidden = layers.GroupNormalization(2)(layers.Dense(8)(hidden))
    return keras.Model(
        inputs, [layers.Dense(3, name=name, dtype="float32")(hidden) for name in ("one", "other")]
    )


def arrays(place: Place, data: Data) -> Arguments:
    x, y, *weights = place.share(data)
    return {
        "x": x,
        "y": y,
        "batch_size": place.batch,
        "sample_weight": weights[0] if weights else None,
    }


def cut(of_second: int) -> Callable[[Place, Data], Arguments]:
    """Makes the last batch of an epoch smaller: 2 on rank 0, and `of_second` on the others."""

    def feed(place: Place, data: Data) -> Arguments:
        x, y = place.share(data)
        left = 2 * place.size if place.alone else (2 if hi.rank() == 0 else of_second)
        keep = (STEPS - 1) * place.batch + left
        return {"x": x[:keep], "y": y[:keep], "batch_size": place.batch}

    return feed


def dataset(place: Place, data: Data) -> Arguments:
    return {
        "x": place.share(tf.data.Dataset.from_tensor_slices(data)).batch(place.batch).prefetch(1)
    }


def generator(place: Place, data: Data) -> Arguments:
    x, y = place.share(data)

    def batches() -> Iterator[Data]:
        while True:
            yield from zip(np.split(x, STEPS), np.split(y, STEPS), strict=True)

    return {"x": batches(), "steps_per_epoch": STEPS}


class Batches(keras.utils.PyDataset):
    def __init__(self, data: Data):
        super().__init__()
        self.pairs = list(zip(*(np.split(each, STEPS) for each in data), strict=True))

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Data:
        return self.pairs[index]


def py_dataset(place: Place, data: Data) -> Arguments:
    return {"x": Batches(place.share(data))}


def validated(place: Place, data: Data) -> Arguments:
    """Trains on the first half of the examples and validates on the second."""
    x, y = place.share(data)
    half = len(x) // 2
    validation = {"validation_data": (x[half:], y[half:]), "validation_batch_size": place.batch}
    return {"x": x[:half], "y": y[:half], "batch_size": place.batch} | validation


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """Adds a GPU to TensorFlow's list of devices.

    `compile(jit_compile="auto")`, for example, reads that list.
    """
    list_devices = tf.config.list_physical_devices

    def devices(kind=None):
        listed = list(list_devices(kind))
        return listed if kind not in (None, "GPU") else [*listed, mock.Mock(device_type="GPU")]

    with mock.patch.object(tf.config, "list_physical_devices", devices):
        yield


def case(
    make: Callable[[], keras.Model] = dense,
    inner: Callable[..., Any] = lambda **more: keras.optimizers.SGD(0.1, momentum=0.9, **more),
    data: Callable[[int], Data] = vectors,
    feed: Callable[[Place, Data], Arguments] = arrays,
    *,
    close: float = 2e-6,
    differs: str = "",
    logs: bool = True,
    policy: str = "float32",
    gpu: bool = False,
    objective: Any = None,
    compiled: Arguments | None = None,
    given: Arguments | None = None,
    wrapped: Arguments | None = None,
    callbacks: Callable[[], list[Any]] = list,
    **fitted: Any,
) -> Program:
    """Returns a program that calls `compile` and `fit` once.

    Args:
      make: Makes the model.
      inner: Makes the optimizer.
      data: Makes all examples.
      feed: Makes the arguments of `fit` that hold the examples of a place.
      close: See `Program`.
      differs: See `Program`.
      logs: See `Program`.
      policy: Dtype policy of the ranks; one process always uses float32.
      gpu: Whether TensorFlow lists a GPU.
      objective: The loss.
      compiled: Arguments of `compile` that choose how steps run, for ranks only.
      given: Other arguments of `compile`.
      wrapped: Arguments of `DistributedOptimizer`.
      callbacks: Makes further callbacks.
      fitted: Arguments of `fit`.
    """

    def run(place: Place) -> Result:
        keras.config.set_dtype_policy("float32" if place.alone else policy)
        model = make()
        optimizer = place.optimizer(inner(), **(wrapped or {}))
        chosen = objective or loss()
        heads = len(model.outputs)
        with pretended_gpu() if gpu and not place.alone else contextlib.nullcontext():
            model.compile(
                optimizer,
                [chosen] * heads if heads > 1 else chosen,
                metrics=["accuracy"] if heads == 1 else None,
                **place.compiled(**(compiled or {})),
                **(given or {}),
            )
        arguments = (
            {"epochs": EPOCHS, "shuffle": False, "verbose": 0}
            | feed(place, data(place.examples))
            | fitted
        )
        history = model.fit(**arguments, callbacks=place.callbacks(*callbacks())).history
        assert place.alone or model.optimizer is optimizer
        return model, history

    return Program(run, close, differs, logs)


def sgd(rate: float = 0.1, **arguments: Any) -> Callable[[], Any]:
    return lambda: keras.optimizers.SGD(rate, momentum=0.9, **arguments)


def adam(**arguments: Any) -> Callable[[], Any]:
    return lambda: keras.optimizers.Adam(0.01, **arguments)


def sums() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(True, reduction="sum")


def several() -> Any:
    return of.MultiOptimizer(of.OptimizerMap(of.Adam(0.01), {".*bias": of.SGD(0.1)}))


ONCE_AN_UPDATE = "once per update; Keras does it after each micro-batch"
OWN_STATISTICS = "each rank normalizes its own batch"
OWN_NUMBERS = "each rank draws different numbers"
OWN_COUNT = "each rank divides by its own count"
of = keras.optimizers
RATES = {"Adadelta": 1.0, "Adagrad": 0.1, "Ftrl": 0.1}
KERAS = (
    *(
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "Ftrl",
        "Lamb",
        "Lion",
        "Muon",
        "Nadam",
    ),
    *("RMSprop", "ScheduleFreeAdamW", "SGD"),
)

ROWS: dict[str, dict[str, Program]] = {
    "Keras's optimizers": (
        {
            name: case(inner=lambda name=name: getattr(of, name)(RATES.get(name, 0.01)))
            for name in KERAS
            if hasattr(of, name)
        }
        | ({"MultiOptimizer": case(inner=several)} if hasattr(of, "MultiOptimizer") else {})
    ),
    "optimizers of `hi`": {
        **{
            name: case(inner=lambda name=name: optimizers.create(name)) for name in optimizers.NAMES
        },
        "clipped": case(inner=lambda: optimizers.create("adamw", global_clipnorm=0.05)),
    },
    "`clipnorm`, `clipvalue`, `global_clipnorm`, weight decay, regularizers, constraints": (
        {
            name: case(inner=sgd(**{name: 0.05}))
            for name in ("clipnorm", "clipvalue", "global_clipnorm")
        }
        | {
            "decay": case(inner=sgd(weight_decay=0.01)),
            "both": case(
                lambda: dense(
                    kernel_regularizer="l2", kernel_constraint=keras.constraints.MaxNorm(0.9)
                )
            ),
            "of activities": case(lambda: dense(activity_regularizer=keras.regularizers.L2(0.01))),
        }
    ),
    "`use_ema`, `SwapEMAWeights`": {
        "at the end": case(inner=sgd(use_ema=True, ema_momentum=0.8)),
        "swapped": case(
            inner=sgd(use_ema=True, ema_momentum=0.8),
            feed=validated,
            callbacks=lambda: [keras.callbacks.SwapEMAWeights(swap_on_epoch=False)],
        ),
    },
    "`keras.optimizers.schedules`": {
        "cosine": case(
            inner=lambda: of.SGD(
                of.schedules.CosineDecay(0.0, 8, warmup_target=0.3, warmup_steps=3)
            )
        ),
    },
    "`hi.schedules`": {
        "polynomial": case(wrapped={"schedule": hi.schedules.polynomial(0.3, 2, warmup_epochs=1)}),
        "hybrid": case(
            inner=lambda: hi.optimizers.Hybrid(adabound_lr=0.05),
            wrapped={"schedule": hi.schedules.hybrid(0.3, 2, warmup_epochs=1)},
        ),
    },
    "`LearningRateScheduler`, `ReduceLROnPlateau`, `EarlyStopping`": {
        "scheduler": case(
            callbacks=lambda: [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)]
        ),
        "plateau": case(
            feed=validated,
            epochs=3,
            callbacks=lambda: [
                keras.callbacks.ReduceLROnPlateau("val_loss", 0.5, 1, min_delta=10.0)
            ],
        ),
        "stopping": case(
            feed=validated,
            epochs=4,
            callbacks=lambda: [
                keras.callbacks.EarlyStopping("val_loss", 10.0, restore_best_weights=True)
            ],
        ),
    },
    "`gradient_accumulation_steps`": {
        "of Keras": case(inner=adam(gradient_accumulation_steps=2)),
        "not dividing the steps": case(inner=adam(gradient_accumulation_steps=3)),
        "XLA, two steps per execution": case(
            inner=sgd(gradient_accumulation_steps=2),
            compiled={"jit_compile": True, "steps_per_execution": 2},
        ),
    },
    "accumulation with EMA, a constraint or a schedule of Keras": {
        "EMA": case(
            inner=sgd(gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.8),
            differs=ONCE_AN_UPDATE,
        ),
    },
    "`run_eagerly=True`, `steps_per_execution`": {
        "eager": case(compiled={"run_eagerly": True}),
        "eager own step": Program(lambda place: own_step(place, run_eagerly=True)),
        "steps, not dividing": case(compiled={"steps_per_execution": 3}),
        "own steps": Program(lambda place: own_step(place, steps_per_execution=2)),
    },
    "`jit_compile`": {
        "on": case(compiled={"jit_compile": True}),
        "auto on a GPU": case(two_outputs, data=two_targets, gpu=True),
        "own step": Program(lambda place: own_step(place, jit_compile=True)),
    },
    "sample weights, class weights, several outputs": {
        "sample weights": case(data=weighted),
        "class weights": case(class_weight={0: 0.5, 1: 1.0, 2: 2.0}),
        "two outputs": case(two_outputs, data=two_targets),
        "weighted outputs": case(two_outputs, data=two_targets, given={"loss_weights": [0.3, 1.0]}),
    },
    "frozen layers": {"first": case(lambda: dense(trainable=False))},
    "convolutions, RNN, LayerNormalization, GroupNormalization": {
        "convolution": case(convolved, data=images),
        "LSTM": case(lambda: recurrent(lambda: layers.LSTM(5)), data=tokens),
        "Bidirectional": case(
            lambda: recurrent(lambda: layers.Bidirectional(layers.SimpleRNN(4))), data=tokens
        ),
        "normalized": case(
            lambda: dense(layers.LayerNormalization, lambda: layers.GroupNormalization(2))
        ),
    },
    "embeddings": {
        "SGD": case(lambda: recurrent(layers.Flatten), lambda: of.SGD(0.1), tokens),
        "Adam": case(
            lambda: recurrent(layers.Flatten),
            adam(),
            tokens,
            differs="Keras does not change the state of rows that are absent from the batch",
        ),
    },
    "BatchNormalization": {
        "trained": case(lambda: dense(layers.BatchNormalization), differs=OWN_STATISTICS),
        "frozen": case(lambda: dense(lambda: layers.BatchNormalization(trainable=False))),
    },
    "`BatchNormalization(synchronized=True)`": {
        "images and vectors": case(normalized_over_ranks, data=images),
        "accumulated": case(normalized_over_ranks, sgd(gradient_accumulation_steps=2), images),
        "float16": case(
            normalized_over_ranks, data=images, policy="mixed_float16", close=5e-3, differs=ROUNDED
        ),
    },
    "Dropout and random augmentation": {
        "dropout": case(lambda: dense(lambda: layers.Dropout(0.3)), differs=OWN_NUMBERS)
    },
    "a loss over masked tokens": {
        "tags": case(
            lambda: embedded(
                lambda: layers.LSTM(4, return_sequences=True), lambda: layers.Dense(3), mask=True
            ),
            data=tagged,
            differs=OWN_COUNT,
        )
    },
    '`reduction="sum"`': {
        "as it is": case(objective=sums(), differs="the mean of the ranks' sums"),
        "learning rate times ranks": case(
            inner=lambda: of.SGD(0.02 * hi.size(), momentum=0.9), objective=sums(), logs=False
        ),
    },
    "mixed precision": (
        {
            policy: case(policy=policy, close=5e-3, differs=ROUNDED)
            for policy in ("mixed_float16", "mixed_bfloat16")
        }
        | {
            "own step, float16": Program(
                lambda place: own_step(place, "mixed_float16"), 5e-3, ROUNDED
            ),
        }
    ),
    "`tf.data`, generators, `PyDataset`": {
        "dataset": case(feed=dataset),
        "weighted dataset": case(data=weighted, feed=dataset),
        "endless generator": case(feed=generator),
        "PyDataset": case(feed=py_dataset),
    },
    "validation, partial batches": {
        "data": case(feed=validated),
        "split": case(validation_split=0.25),
        "the same part on all ranks": case(feed=cut(2)),
        "other parts": case(feed=cut(1), differs="each rank has the same weight"),
    },
}
PROGRAMS = {
    f"{row}: {name}": program
    for row, programs in ROWS.items()
    for name, program in programs.items()
}
