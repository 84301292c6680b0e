"""The compiled training step, in the form that a GPU would run."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet import optimizers, xla
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.data.image_mixing import ImageMixer
from hybrid_imagenet.models import factory
from hybrid_imagenet.optimizers.distributed import UPDATE_SCOPE, DistributedOptimizer
from hybrid_imagenet.optimizers.kinds import classify
from hybrid_imagenet.optimizers.reducer import GradientReducer
from hybrid_imagenet.order import sampling
from hybrid_imagenet.training import step as step_module
from hybrid_imagenet.training.loss_alarm import highest_loss
from hybrid_imagenet.training.losses import LOSSES, mixed_loss
from hybrid_imagenet.training.step import TrainStep


class MarkingReducer(GradientReducer):
    """Adds an operation to the graph where each reduction over ranks would be."""

    def reduce(self, grads, names):
        marked = [
            tf.raw_ops.EnsureShape(input=tf.cast(g, tf.float32), shape=g.shape) for g in grads
        ]
        return super().reduce(marked, names)


def traced():
    """Traces a step with --jit_compile.

    Returns the network, the graph, and the functions that XLA compiles before the update.
    """
    communicator = SingleProcess()
    model = factory.create("resnet10", 5, 16, precision="float32")
    inner = optimizers.create("sgd", weight_decay=0.0, learning_rate=0.1)
    inner.set_kinds(classify(model))
    optimizer = DistributedOptimizer(inner, loss_scale=1, communicator=communicator)
    optimizer._reducer = MarkingReducer(communicator)
    step = TrainStep(
        model,
        optimizer,
        lambda batch: batch["image"],
        jit_compile=True,
    )
    batch = {"image": tf.TensorSpec([2, 16, 16, 3]), "label": tf.TensorSpec([2], tf.int32)}
    graph = step.update.get_concrete_function(batch).graph
    before = [op for op in graph.get_operations() if not op.name.startswith(UPDATE_SCOPE)]
    calls = [op for op in before if "_XlaMustCompile" in op.node_def.attr]
    library = {
        function.signature.name: function for function in graph.as_graph_def().library.function
    }
    compiled = [library[op.get_attr("f").name] for op in calls if op.get_attr("_XlaMustCompile")]
    return model, graph, compiled


@pytest.mark.parametrize("loss", LOSSES)
def test_step_with_a_mixer_records_loss_and_accuracy_of_mixed_labels(loss):
    communicator = SingleProcess()
    mixer = ImageMixer(mixup_alpha=1.0, cutmix_alpha=1.0)
    model = keras.Sequential(
        [keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(6)]
    )
    inner = optimizers.create("sgd", learning_rate=0.1)
    inner.set_kinds(classify(model))
    step = TrainStep(
        model,
        DistributedOptimizer(inner, loss_scale=1, communicator=communicator),
        lambda batch: mixer.images(batch["image"], batch["seed"]),
        loss=LOSSES[loss],
        label_smoothing=0.1,
        mixer=mixer,
    )
    random = np.random.default_rng(0)
    examples = np.arange(32)
    batch = {
        "image": tf.constant(random.normal(size=(32, 8, 8, 3)), tf.float32),
        "label": tf.constant(random.integers(0, 6, 32)),
        "seed": tf.constant(sampling.seeds(0, 0 * examples, examples)),
    }
    logits = model(mixer.images(batch["image"], batch["seed"]))
    labels = mixer.labels(batch["label"], batch["seed"], 8)
    losses = mixed_loss(LOSSES[loss], logits, labels, 0.1)
    before = model.trainable_variables[1].numpy()
    step.update(batch)
    recorded = step.sums.read()
    assert recorded.loss == pytest.approx(float(tf.reduce_sum(losses)), rel=1e-5)
    is_right = np.argmax(logits, axis=1) == labels.larger().numpy()
    assert recorded.top1 == is_right.sum()
    # The gradient of a bias is the mean difference between probability and target of its class.
    if loss == "softmax":
        share = labels.share[:, None]
        targets = share * tf.one_hot(labels.own, 6) + (1 - share) * tf.one_hot(labels.partner, 6)
        gradient = tf.reduce_mean(tf.nn.softmax(logits) - (0.9 * targets + 0.1 / 6), axis=0)
        moved = before - model.trainable_variables[1].numpy()
        np.testing.assert_allclose(moved, 0.1 * gradient, rtol=1e-4, atol=1e-7)


def test_step_with_class_weights_equals_keras():
    weights = np.array([0.5, 4.0, 1.5], np.float32)
    random = np.random.default_rng(0)
    images = random.normal(size=(32, 4, 4, 3)).astype(np.float32)
    labels = random.integers(0, 3, 32)
    layers = [keras.Input((4, 4, 3)), keras.layers.Flatten(), keras.layers.Dense(3)]
    ours = keras.Sequential(layers)
    theirs = keras.models.clone_model(ours)
    theirs.set_weights(ours.get_weights())

    theirs.compile(
        keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    loss = theirs.train_on_batch(images, labels, class_weight=dict(enumerate(map(float, weights))))

    inner = optimizers.create("sgd", learning_rate=0.1, momentum=0.0)
    inner.set_kinds(classify(ours))
    step = TrainStep(
        ours,
        DistributedOptimizer(inner, loss_scale=1, communicator=SingleProcess()),
        lambda batch: batch["image"],
        class_weights=weights,
    )
    # A network that guesses has a loss up to the largest weight times that of other networks.
    assert step.alarm.threshold == pytest.approx(4 * highest_loss(3))
    step.update({"image": tf.constant(images), "label": tf.constant(labels)})
    assert step.sums.read().loss / 32 == pytest.approx(float(loss), rel=1e-5)
    for actual, expected in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def count(nodes, name):
    """Counts the nodes of one kind of operation."""
    return sum(node.op == name for node in nodes)


def test_step_that_omits_images_cannot_be_compiled_by_xla():
    with pytest.raises(ValueError, match="subsample_batch cannot be combined with jit_compile"):
        TrainStep(None, None, None, subsample_batch=lambda batch: (batch, 1.0), jit_compile=True)


def test_step_with_jit_compile_leaves_the_reduction_outside_xla():
    model, graph, compiled = traced()
    outside = graph.as_graph_def().node
    (inside,) = [function.node_def for function in compiled]
    assert count(inside, "FusedBatchNormV3") == count(inside, "FusedBatchNormGradV3") > 0
    assert (
        count(inside, "SparseSoftmaxCrossEntropyWithLogits")
        + count(inside, "SoftmaxCrossEntropyWithLogits")
        == 1
    )
    assert count(inside, "EnsureShape") == 0
    assert count(outside, "EnsureShape") == len(model.trainable_variables)
    assert (
        count(outside, "FusedBatchNormV3")
        == count(outside, "Conv2D")
        == count(outside, "MatMul")
        == 0
    )


def test_step_with_the_fused_operations_of_a_gpu_equals_the_step_of_a_cpu(monkeypatch):
    """Compares casts, statistics, update and sums for a GPU, not compiled, with those for a CPU.

    Both use the convolutions for CPUs. TensorFlow's kernel for the update of a variable rounds once
    where the update of the vector rounds twice.
    """

    def run(gpu):
        monkeypatch.setattr(xla, "has_gpu", lambda: gpu)
        monkeypatch.setattr(step_module, "has_gpu", lambda: gpu)
        monkeypatch.setenv("HYBRID_IMAGENET_XLA", "0")
        communicator = SingleProcess()
        model = factory.create(
            "resnet10", 5, 16, precision="mixed_float16", batch_norm="moving", width=8
        )
        inner = optimizers.create("sgd", weight_decay=1e-4, learning_rate=0.1, momentum=0.0)
        inner.set_kinds(classify(model))
        optimizer = DistributedOptimizer(inner, loss_scale=1, communicator=communicator)
        step = TrainStep(model, optimizer, lambda batch: batch["image"])
        random = np.random.default_rng(0)
        for _ in range(3):
            images = tf.constant(random.normal(size=(4, 16, 16, 3)), tf.float16)
            labels = tf.constant(random.integers(0, 5, 4))
            step.update({"image": images, "label": labels})
        values = [v.numpy() for v in model.variables] + [step.telemetry.read("grad_norm")]
        return values, step.sums.read()

    expected, *counts = run(False)
    actual, *others = run(True)
    for a, b in zip(expected, actual, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
    assert others == counts
