"""Trains a network from a configuration, from the data to the summary; the second file to read."""

from __future__ import annotations

import tensorflow as tf

from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.config import Config, checks, derived
from hybrid_imagenet.resilience import rollback
from hybrid_imagenet.resilience.rollback import DivergedError
from hybrid_imagenet.stages import START
from hybrid_imagenet.training import automatic_batch, build, dev_run, hardware, resumed_flags, same_data
from hybrid_imagenet.training.recorder import Recording
from hybrid_imagenet.training.session import Session, together


def run(
    config: Config,
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
    if not config.fast_dev_run:
        return _run(config, communicator, session)
    with together(communicator):
        parts = dev_run.parts(config)
    outcome = ""
    for part in parts:
        outcome = outcome or _run(part, communicator, session)
    if not outcome:
        with together(communicator):
            if communicator.rank == 0:
                print(dev_run.report(parts[-1]), flush=True)
    return outcome


def _run(config: Config, communicator: Communicator, session: type[Session] | None) -> str:
    START.begin("reading the data set")
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    with together(communicator):
        precision = hardware.choose_precision(config.precision, config.model)
        build.check_decoder(config)
        found = resumed_flags.description(config) if communicator.rank == 0 else None
        train_source, validation_source = build.sources(config)
    same_data.check_ranks(communicator, build.by_name(config, train_source, validation_source))
    earlier = communicator.broadcast_object(found)
    config, note = automatic_batch.settle(
        config, communicator, precision, train_source.num_classes, train_source.num_examples, earlier
    )
    workers = derived.workers(config, communicator.size)
    config = resumed_flags.keep_choices(config, earlier)
    config = derived.settle(config, workers)
    with together(communicator):
        build.check_window(config, train_source)

    def begin(rollback: rollback.Rollback | None) -> str:
        with together(communicator):
            checks.check_data(config, train_source.num_examples, workers)
            held = rollback.run_dir if rollback else None
            recording = Recording(config, communicator.rank, communicator.size, note, held)
        START.begin("building the model")
        parts = config, communicator, recording, precision, train_source, validation_source
        try:
            return (session or Session)(*parts, rollback).run()
        except DivergedError as error:
            recording.interrupt()
            error.run_dir = recording.path
            raise

    return rollback.run(begin, config.rollback)
