"""Trains one small network on two ranks, by each library.

    python benchmarks/peers/fit_ranks.py WAY [WIDTH]

WAY is `keras` (one process), `hi`, `horovod`, `horovod_bare` (without its callbacks),
`horovod_tape` (its tape in a `train_step`), `multiworker` (TensorFlow's strategy) or `ddp`
(PyTorch, by an interpreter that has it). WIDTH is the number of channels of the first convolution
(default: 32). Each rank prints its median step in ms and a checksum of the first weights: it is the
same on all ranks that train together.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

BATCH, STEPS, EPOCHS, RANKS = 32, 15, 6, 2
WAYS = ("keras", "hi", "horovod", "horovod_bare", "horovod_tape", "multiworker", "ddp")


def data(rank: int) -> tuple[Any, Any]:
    """A rank's images and classes."""
    import numpy as np

    random = np.random.default_rng(rank)
    count = BATCH * STEPS
    return random.normal(size=(count, 32, 32, 3)).astype(np.float32), random.integers(0, 10, count)


def network(keras: Any, width: int) -> Any:
    """Three convolutions, 65,000 weights with a width of 32."""
    layers = keras.layers
    hidden = [
        layers.Conv2D(filters, 3, strides, "same", activation="relu")
        for filters, strides in ((width, 1), (2 * width, 2), (2 * width, 2))
    ]
    return keras.Sequential(
        [keras.Input((32, 32, 3)), *hidden, layers.GlobalAveragePooling2D(), layers.Dense(10)]
    )


def with_keras(way: str, width: int) -> tuple[list[float], float]:
    """Trains by `fit`; returns seconds of epochs and the checksum."""
    rank, callbacks, scope = 0, [], None
    if way == "hi":
        import hybrid_imagenet as hi

        hi.init(1)
        rank = hi.rank()
    elif way.startswith("horovod"):
        import horovod.tensorflow.keras as hvd

        hvd.init()
        rank = hvd.rank()
    elif way == "multiworker":
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        cluster = {"worker": [f"localhost:{23450 + number}" for number in range(RANKS)]}
        os.environ["TF_CONFIG"] = json.dumps(
            {"cluster": cluster, "task": {"type": "worker", "index": rank}}
        )
    import keras
    import tensorflow as tf

    if way != "hi":
        tf.config.threading.set_intra_op_parallelism_threads(1)
    if way == "multiworker":
        scope = tf.distribute.MultiWorkerMirroredStrategy().scope()
        scope.__enter__()
    keras.utils.set_random_seed(1)
    model, optimizer = network(keras, width), keras.optimizers.SGD(0.01)
    if way == "hi":
        optimizer, callbacks = hi.DistributedOptimizer(optimizer), hi.callbacks.default_callbacks()
    elif way == "horovod_tape":
        model.__class__ = type("Taped", (type(model),), {"train_step": _taped(tf)})
    elif way.startswith("horovod"):
        optimizer = hvd.DistributedOptimizer(optimizer)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if way == "horovod" else []
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ends: list[float] = [time.perf_counter()]
    callbacks.append(
        keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: ends.append(time.perf_counter()))
    )
    x, y = data(rank)
    model.fit(x, y, BATCH, EPOCHS, 0, callbacks, shuffle=False)
    return [b - a for a, b in itertools.pairwise(ends)], float(abs(model.get_weights()[0]).sum())


def _taped(tf: Any) -> Any:
    import horovod.tensorflow as hvd

    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        tape = hvd.DistributedGradientTape(tape)
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        return {"loss": loss}

    return train_step


def with_ddp(width: int) -> tuple[list[float], float]:
    """Trains with DistributedDataParallel over gloo."""
    import torch
    from torch import nn

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(1)
    layers: list[Any] = []
    shapes = ((3, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 2))
    for inputs, filters, stride in shapes:
        layers += [nn.Conv2d(inputs, filters, 3, stride, 1), nn.ReLU()]
    classifier = nn.Linear(2 * width, 10)
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), classifier)
    model = nn.parallel.DistributedDataParallel(net.to(memory_format=torch.channels_last))
    optimizer, loss_of = torch.optim.SGD(model.parameters(), 0.01), nn.CrossEntropyLoss()
    torch.manual_seed(2 + rank)
    x = torch.randn(BATCH * STEPS, 3, 32, 32).to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (BATCH * STEPS,))
    seconds = []
    for _ in range(EPOCHS):
        begin = time.perf_counter()
        for at in range(0, BATCH * STEPS, BATCH):
            optimizer.zero_grad()
            loss_of(model(x[at : at + BATCH]), y[at : at + BATCH]).backward()
            optimizer.step()
        seconds.append(time.perf_counter() - begin)
    return seconds, float(next(net.parameters()).abs().sum())


def main() -> int:
    """Starts the ranks, or is one."""
    way = sys.argv[1]
    width = int(sys.argv[2]) if len(sys.argv) > 2 else 32
    if way not in WAYS:
        sys.exit(f"{way}: give one of {', '.join(WAYS)}")
    if way != "keras" and len(sys.argv) < 4:
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={RANKS}"]
        mpirun = [
            "mpirun",
            "--allow-run-as-root",
            "--oversubscribe",
            "--bind-to",
            "none",
            "-np",
            str(RANKS),
            sys.executable,
        ]
        return subprocess.call(
            [*(torchrun if way == "ddp" else mpirun), __file__, way, str(width), "rank"]
        )
    seconds, checksum = with_ddp(width) if way == "ddp" else with_keras(way, width)
    step = 1000 * statistics.median(seconds[1:]) / STEPS
    print(f"{way}: {step:.1f} ms a step of {BATCH}, weights {checksum:.6f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
