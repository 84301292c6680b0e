"""`model.fit` with the library's parts gives the weights of the training program."""

import dataclasses

import numpy as np
import pytest

import hybrid_imagenet as hi
from hybrid_imagenet.checkpoints import archive
from tests.library import programs
from tests.support import program

FLAGS = (
    "--model=resnet8",
    "--model_width=4",
    "--image_size=16",
    "--epochs=5",
    "--optimizer=hybrid",
    "--warmup_epochs=2",
    "--zero_last_gamma=false",
    "--loss_scale=1024",
)


def through_fit(arguments: list, epochs: int) -> dict:
    """Returns the weights, by path, that `fit` gives with the parts of a configuration.

    The parts are its batches, network, optimizer and schedule.
    """
    import keras
    import tensorflow as tf

    from hybrid_imagenet import config as configuration
    from hybrid_imagenet import run_plan
    from hybrid_imagenet.order.sampling import Cursor
    from hybrid_imagenet.training import build
    from hybrid_imagenet.training.inputs import TrainingData

    with programs.ranks():
        config = configuration.resolve(arguments, hi.size())
        tf.config.experimental.enable_op_determinism()
        source, _ = build.sources(config.data, config.run.seed)
        plan = run_plan.make(config, "float32")
        optimizer = hi.DistributedOptimizer(
            plan.optimizer.create(),
            schedule=plan.schedule.values,
            compression=plan.optimizer.compression,
            loss_scale=float(plan.optimizer.loss_scale),
        )
        communicator = hi.communicator()
        order = build.sample_order(plan, source)
        options = build.host_options(plan.data.reading, 1)
        data = TrainingData(plan, source, order, communicator, options)
        prepare = build.train_preprocess(plan)
        # Ranks begin with different weights, so that the broadcast is needed.
        model = build.model(
            dataclasses.replace(plan, seed=plan.seed + communicator.rank),
            source.num_classes,
            communicator,
        )
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        batches = data.stream(Cursor(0, 0))

        def pairs():
            for batch in batches:
                yield prepare(batch), batch["label"]

        steps = source.num_examples // data.global_batch(0)
        assert steps * epochs == 20
        model.fit(
            pairs(),
            epochs=epochs,
            steps_per_epoch=steps,
            verbose=0,
            callbacks=hi.callbacks.default_callbacks(),
        )
        return {v.path: v.numpy().astype(float).ravel().tolist() for v in model.weights}


@pytest.mark.slow
def test_fit_and_program_on_two_ranks_end_in_equal_weights(pools, tiny_data, tmp_path):
    done = program.train_on(pools[2], tiny_data, tmp_path / "run", *FLAGS)
    assert done.returncode == 0, done.stdout + done.stderr
    latest, *_ = sorted((tmp_path / "run" / "checkpoints").glob("step-*.npz"), reverse=True)
    arrays = archive.read(latest).arrays
    expected = {
        name.split("/", 2)[2]: value for name, value in arrays.items() if name.startswith("model/")
    }
    arguments = [
        *program.FLAGS,
        f"--data_dir={tiny_data}",
        f"--run_dir={tmp_path / 'other'}",
        *FLAGS,
    ]
    first, second = pools[2].call(through_fit, arguments, 5)
    assert first == second
    assert set(first) <= set(expected) and len(first) > 20
    for path, values in first.items():
        np.testing.assert_allclose(
            values, np.ravel(expected[path]), rtol=1e-4, atol=1e-5, err_msg=path
        )
