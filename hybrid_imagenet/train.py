"""Trains a network from a configuration, from the data to the summary; the second file to read."""

from __future__ import annotations

import tensorflow as tf

from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.config import RunConfig, checks, resumed
from hybrid_imagenet.stages import START
from hybrid_imagenet.training import build, hardware, same_data
from hybrid_imagenet.training.recorder import Recording
from hybrid_imagenet.training.session import Session, together


def run(
    config: RunConfig,
    communicator: Communicator,
    session: type[Session] | None = None,
) -> str:
    """Trains as configured; every rank calls it.

    Args:
      config: what to do.
      communicator: the ranks.
      session: takes the place of `Session`, for measurements.

    Returns:
      Why the run ended: "" (all epochs), "target" or "preempted".

    Raises:
      UserError: for data or directories that cannot be used, before training; or for what training cannot survive.
    """
    START.begin("reading the data set")
    config = resumed.shared(config, communicator.broadcast_object)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    with together(communicator):
        precision = hardware.choose_precision(config.precision, config.model)
        build.check_decoder(config)
        train_source, validation_source = build.sources(config)
    same_data.check_ranks(communicator, build.by_name(config, train_source, validation_source))
    with together(communicator):
        build.check_window(config, train_source)
        checks.check_data(config, train_source.num_examples)
        recording = Recording(config, communicator.rank, communicator.size)
    START.begin("building the model")
    return (session or Session)(config, communicator, recording, precision, train_source, validation_source).run()
