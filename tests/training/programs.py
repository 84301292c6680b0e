"""Programs that the tests of training run on each rank."""

import numpy as np

from hybrid_imagenet import comm, run_plan
from tests.support import in_process, program

BATCH = 8


def cluster_2_step(loss: float, steps: int, *more_flags: str) -> dict:
    """Takes steps by the flags of cluster 2, with gradients of about the size of the loss.

    Args:
      loss: The loss.
      steps: Number of steps.
      more_flags: Replace flags of cluster 2.

    Returns:
      The size of the last gradient and the one that it should have, the counts of updates and of
      skipped steps, and the types of computation and sending.
    """
    from hybrid_imagenet import config

    flags = [
        "--flagfile=flags/cluster2.flags",
        *("--dataset=synthetic", "--num_examples=64", "--model=resnet8", "--image_size=8"),
        *("--model_width=4", "--stem=3x3", "--per_gpu_batch=4"),
    ]
    resolved = config.resolve([*flags, *more_flags], comm.read_placement().size)
    communicator = comm.start(run_plan.make(resolved).communication)
    import keras
    import tensorflow as tf

    from hybrid_imagenet.training import build

    keras.utils.set_random_seed(0)
    plan = run_plan.make(resolved)
    network = build.model(plan, 10, communicator)
    optimizer = build.optimizer(plan, network, communicator)
    variables = network.trainable_variables
    optimizer.build(variables)
    # The gradient is the same at all weights, so an update changes nothing that is compared.
    norm = loss * sum(v.shape.num_elements() for v in variables) ** 0.5

    @tf.function(autograph=False)
    def step() -> None:
        scaled = optimizer.scale_loss(tf.constant(loss))
        optimizer.apply([tf.fill(v.shape, scaled) for v in variables], variables)

    for _ in range(steps):
        step()
    return {
        "norm": [float(optimizer.grad_norm), norm],
        "updates": int(optimizer.iterations),
        "skipped": int(optimizer.loss_scale.skipped_steps),
        "types": [plan.precision, optimizer.reducer.statistics()["buckets"][0]["wire"]],
    }


def four_steps(micro: int) -> list:
    """Returns the weights after four steps over both phases of the hybrid method.

    Each rank takes `micro` micro-batches per update.
    """
    communicator = comm.start(comm.CommunicationSettings())
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
    inner = optimizers.create("hybrid", learning_rate=0.05, momentum=0.9, trust_coefficient=0.001)
    inner.set_kinds(classify(model))
    step = TrainStep(
        model,
        DistributedOptimizer(inner, loss_scale=64.0, communicator=communicator),
        lambda batch: batch["image"],
    )
    if micro > 1:
        step.prepare_accumulation()
    generator = np.random.default_rng(0)
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
            step.update(last, tf.constant(float(micro)))
        else:
            step.update(last)
    return [v.numpy().astype(float).ravel()[:200].tolist() for v in model.trainable_variables]


def train_on_own_data(folder: str) -> list:
    """Trains with `program.FLAGS`, each rank on the dataset in its own directory."""
    directories = [
        f"--data_dir={folder}/{comm.read_placement().rank}",
        f"--run_dir={folder}/run",
        "--epochs=1",
    ]
    return in_process.call("hybrid_imagenet.main", [*program.FLAGS, *directories])
