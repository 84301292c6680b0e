"""Programs that the tests of training run on each rank."""

import numpy as np

from hybrid_imagenet import comm
from tests.support import in_process, program

BATCH = 8


def four_steps(micro: int) -> list:
    """Returns the weights after four steps over both phases of the hybrid method.

    Each rank takes `micro` micro-batches per update.
    """
    communicator = comm.start(comm.CommunicationSettings(compression="none"))
    import keras
    import tensorflow as tf

    from hybrid_imagenet import optimizers
    from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
    from hybrid_imagenet.optimizers.kinds import classify
    from hybrid_imagenet.training.step import TrainStep

    keras.utils.set_random_seed(3)
    layers = [
        keras.layers.Conv2D(8, 3, activation="relu"),
        keras.layers.LayerNormalization(),
        keras.layers.Flatten(),
        keras.layers.Dense(5, dtype="float32"),
    ]
    model = keras.Sequential([keras.Input((8, 8, 3)), *layers])
    inner = optimizers.create("hybrid", learning_rate=0.05, momentum=0.9, lars_eta=0.001)
    inner.set_kinds(classify(model))
    step = TrainStep(
        model,
        DistributedOptimizer(inner, loss_scale=64.0, communicator=communicator),
        lambda batch: batch["image"],
        communicator,
    )
    if micro > 1:
        step.prepare_accumulation()
    generator = np.random.default_rng(0)
    control = tf.constant([0, 0])
    examples = BATCH // communicator.size // micro
    for number in range(4):
        images = generator.normal(size=(BATCH, 8, 8, 3)).astype(np.float32)
        labels = generator.integers(0, 5, BATCH).astype(np.int32)
        phase = {
            "phase": float(number >= 2),
            "lower_bound": 0.02,
            "upper_bound": 0.5,
            "learning_rate": 0.05,
        }
        inner.hyperparameters.assign(phase)
        slices = [
            slice(index * examples, (index + 1) * examples)
            for index in range(communicator.rank * micro, (communicator.rank + 1) * micro)
        ]
        *parts, last = [
            {"image": tf.constant(images[index]), "label": tf.constant(labels[index])}
            for index in slices
        ]
        for part in parts:
            step.accumulate(part)
        if parts:
            step.update_from_last_micro_batch(last, control, tf.constant(float(micro)))
        else:
            step.update_from_one_batch(last, control)
    return [v.numpy().astype(float).ravel()[:200].tolist() for v in model.trainable_variables]


def train_on_own_data(folder: str) -> list:
    """Trains with `program.FLAGS`, each rank on the dataset in its own directory."""
    directories = [
        f"--data_dir={folder}/{comm.placement().rank}",
        f"--run_dir={folder}/run",
        "--epochs=1",
    ]
    return in_process.call("hybrid_imagenet.main", [*program.FLAGS, *directories])
