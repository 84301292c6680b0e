"""Plans a run, builds its components, and trains. Read it after `main.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from hybrid_imagenet import run_plan
from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.config import RunConfig, defaults, flag_checks
from hybrid_imagenet.startup import STARTUP_PROGRESS
from hybrid_imagenet.training import build, hardware, same_data
from hybrid_imagenet.training.components import RunComponents
from hybrid_imagenet.training.recorder import Recording
from hybrid_imagenet.training.trainer import Trainer
from hybrid_imagenet.xla import has_gpu

# The passes of TensorFlow's graph optimizer without which a step on a CPU is as fast and has the
# same bits, but is compiled sooner (docs/dev/measurements.md). Remapping, which fuses operations,
# is not one of them.
_PASSES_WITHOUT_GAIN_ON_CPU = (
    "layout_optimizer",
    "constant_folding",
    "shape_optimization",
    "loop_optimization",
    "arithmetic_optimization",
    "dependency_optimization",
    "function_optimization",
)


def run(
    config: RunConfig,
    communicator: Communicator,
    more_callbacks: Callable[[Trainer], Sequence[keras.callbacks.Callback]] = lambda _: (),
) -> str:
    """Trains as configured; every rank calls it.

    Args:
      config: Configuration of the run.
      communicator: Connects the ranks.
      more_callbacks: Returns callbacks that are called after those of the program.

    Returns:
      Why the run ended: "" (all epochs), "target" or "preempted".

    Raises:
      UserError: Before training, for data or directories that cannot be used; later, if training
        cannot continue.
    """
    return Trainer(build_components(config, communicator), more_callbacks).run()


def build_components(config: RunConfig, communicator: Communicator) -> RunComponents:
    """Plans a run and builds its components; every rank calls it.

    The plan needs flags that are the same on all ranks, and some that follow from the data and the
    hardware. So it comes after both are known, and nothing below it sees the flags.

    Args:
      config: Configuration of the run.
      communicator: Connects the ranks.

    Raises:
      UserError: On all ranks, for data or directories that cannot be used.
    """
    if config.ranks != communicator.size:
        raise ValueError(
            f"The configuration is for {config.ranks} ranks, but there are {communicator.size}."
        )
    STARTUP_PROGRESS.begin("reading the dataset")
    with communicator.raise_on_all_ranks():
        config = defaults.shared(config, communicator.broadcast_object)
    if config.run.deterministic:
        tf.config.experimental.enable_op_determinism()
    if not has_gpu():
        tf.config.optimizer.set_experimental_options(
            dict.fromkeys(_PASSES_WITHOUT_GAIN_ON_CPU, False)
        )
    with communicator.raise_on_all_ranks():
        precision = _choose_precision(config, communicator)
        train, validation = build.sources(config.data, config.run.seed)
    sources = {"training": train, config.data.validated_split: validation}
    same_data.check_ranks(communicator, sources)
    with communicator.raise_on_all_ranks():
        build.check_shuffle_window(config.data, train)
        flag_checks.check_data(config, train.num_examples)
        config = defaults.decide_xla(config, train.num_examples, precision)
        plan = run_plan.make(config, precision)
        recording = Recording(plan, communicator.rank, communicator.size)
    STARTUP_PROGRESS.begin("building the model")
    return RunComponents(plan, communicator, recording, sources)


def _choose_precision(config: RunConfig, communicator: Communicator) -> str:
    """Returns the precision of --precision, the same on all ranks; every rank calls it.

    If ranks on different hardware would choose different types, it is float32.
    """
    precision = hardware.choose_precision(config.network.precision, config.network.model)
    choices = communicator.allgather_object(precision)
    return precision if len(set(choices)) == 1 else "float32"
