"""The number of kernels that a GPU starts, counted with XLA's compiler for GPUs.

The compiler is from JAX's CUDA plugin, which is installed once in the user's cache. Its version
differs from the one in TensorFlow, so counts may differ by one or two.
"""

import math
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2

from benchmarks.optimizer import resnet50_shapes
from hybrid_imagenet import optimizers, run_plan
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.comm.fusion import make_buckets
from hybrid_imagenet.comm.packing import ROW_SIZE, round_up_to_rows
from hybrid_imagenet.data import augmentations, device
from hybrid_imagenet.models import stem_program
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.optimizers.executor import StepScalars
from hybrid_imagenet.optimizers.hyperparameters import HYPERPARAMETERS
from hybrid_imagenet.optimizers.kinds import classify_by_rank
from hybrid_imagenet.optimizers.layout import Layout
from hybrid_imagenet.optimizers.loss_scale import LossScale
from hybrid_imagenet.training import build
from tests.gpu import graphs

HERE = pathlib.Path(__file__).parent
CASES = {
    "sgd": {"optimizer": "sgd", "weight_decay": 1e-4},
    "clipped": {"optimizer": "sgd", "weight_decay": 1e-4, "global_clipnorm": 1.0},
    "lars": {"optimizer": "lars", "trust_coefficient": 0.001},
    "adabound": {"optimizer": "adabound"},
    "hybrid": {"optimizer": "hybrid", "trust_coefficient": 0.001, "weight_decay": 1e-4},
    "lamb": {"optimizer": "lamb"},
}


def module(case):
    """Returns the program after the last all-reduce of ResNet-50's FP16 gradients, as HLO."""
    arguments = CASES[case]
    shapes = resnet50_shapes()
    elements = [math.prod(shape) for shape in shapes]
    variables = [keras.Variable(np.zeros(shape, np.float32)) for shape in shapes]
    inner = optimizers.create(**arguments)
    inner.set_kinds(classify_by_rank(variables))
    optimizer = DistributedOptimizer(
        inner,
        loss_scale=LossScale(8.0, dynamic=True),
        communicator=SingleProcess(),
        packed=True,
    )
    optimizer.build(variables)
    buckets = make_buckets(range(len(shapes))[::-1], elements, "float16", 16 << 20, 4 << 20)
    layout = Layout(shapes, [m for b in buckets for m in b.members])
    executor = optimizer.executor
    spec = tf.TensorSpec
    rows = spec([layout.rows, ROW_SIZE], tf.float32)
    old = dict.fromkeys(executor._variables(), rows)
    scalars = StepScalars(
        spec([len(HYPERPARAMETERS)], tf.float32),
        spec([], tf.float32),
        [spec([], tf.int64) for _ in optimizer.loss_scale.counters],
        [spec([], tf.int64) for _ in executor._step_counters()],
    )
    prepare = tf.function(
        lambda *values: executor._before_gradients(layout, *values), autograph=False
    )
    prepared = prepare.get_concrete_function(rows, scalars).structured_outputs
    received = [
        spec([sum(round_up_to_rows(elements[m]) for m in b.members)], tf.float16) for b in buckets
    ]
    prepared = tf.nest.map_structure(
        lambda v: None if v is None else spec(v.shape, v.dtype), prepared
    )
    arguments = received, old, prepared, scalars
    flat = tf.nest.flatten(arguments)

    def program(*values):
        remaining = iter(values)
        filled = [None if value is None else next(remaining) for value in flat]
        return executor._after_gradients(layout, *tf.nest.pack_sequence_as(arguments, filled))

    compiled = tf.function(program, autograph=False, jit_compile=True)
    return compiled.experimental_get_compiler_ir(*[v for v in flat if v is not None])(
        stage="hlo_serialized"
    )


def kernels_of(serialized, target, compiler, folder):
    """Returns the kernels that a GPU starts for a module.

    Results that are copies become reshapes, which the converter of the module supports.
    """
    hlo = hlo_pb2.HloModuleProto.FromString(serialized)
    for computation in hlo.computations:
        for instruction in computation.instructions:
            if instruction.opcode == "copy":
                instruction.opcode = "reshape"
    (folder / "module.pb").write_bytes(hlo.SerializeToString())
    command = [sys.executable, str(HERE / "compiled.py"), str(folder / "module.pb"), target]
    done = subprocess.run(command, env=compiler, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def compiled(function, *specs):
    traced = tf.function(function, autograph=False, jit_compile=True)
    return traced.experimental_get_compiler_ir(*specs)(stage="hlo_serialized")


def whole_step(precision):
    """Returns the forward and backward pass of --jit_compile."""
    with graphs.on_gpu():
        plan = run_plan.make(graphs.resolved("--jit_compile", "--model=resnet10"), precision)
        alone = SingleProcess()
        network = build.model(plan, graphs.CLASSES, alone)
        step = build.train_step(plan, network, build.optimizer(plan, network, alone))
        images = tf.TensorSpec([4, 32, 32, 3], precision.removeprefix("mixed_"))
        labels = tf.TensorSpec([4], tf.int64)
        return compiled(
            lambda *arguments: step._loss_and_gradients(*arguments, None), images, labels
        )


def stem_programs():
    """Returns forward and backward pass of the stem's program at the size of ResNet-50."""
    image = tf.TensorSpec([256, 112, 112, 64], tf.float16)
    pooled = tf.TensorSpec([256, 56, 56, 64], tf.float16)
    winners = tf.TensorSpec(pooled.shape, tf.uint8)
    channel = tf.TensorSpec([64], tf.float32)

    def backward(*arguments):
        return stem_program._backward(*arguments, 1e-5)

    with graphs.on_gpu():
        return [
            compiled(
                lambda *arguments: stem_program._forward(*arguments, 1e-5), image, *[channel] * 2
            ),
            compiled(backward, pooled, winners, image, *[channel] * 3),
        ]


def keeps_activations(started):
    """Returns whether a kernel writes FP32 activations, or their signs, for another kernel."""
    written = [line.partition("fusion(")[0] for line in started]
    return any(kind in line for line in written for kind in ("f32[256,56", "pred["))


def augmentation_program(name, precision):
    side = augmentations.host_augmentation(name, 224).side
    pixels = tf.TensorSpec([8, side, side, 3], tf.uint8)
    seeds = tf.TensorSpec([8, 2], tf.int64)
    dtype = precision.removeprefix("mixed_")
    return compiled(lambda images, keys: device.augment(images, keys, name, dtype), pixels, seeds)


def mixing_program(precision):
    """Returns MixUp and CutMix after the augmentation of AlexNet, with the labels they add."""
    flags = ["--mixup_alpha=0.2", "--cutmix_alpha=1", "--augmentation=alexnet"]
    plan = run_plan.make(graphs.resolved(*flags), precision)
    prepare = build.train_preprocess(plan)
    mixer = build.image_mixer(plan)
    side = augmentations.host_augmentation("alexnet", 224).side
    pixels = tf.TensorSpec([8, side, side, 3], tf.uint8)
    seeds = tf.TensorSpec([8, 2], tf.int64)

    def mix(images, keys, labels):
        batch = {"image": images, "seed": keys}
        return prepare(batch), tuple(mixer.labels(labels, keys, side)[1:])

    return compiled(mix, pixels, seeds, tf.TensorSpec([8], tf.int64))


@pytest.mark.slow
@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="the compiler is pinned for Python 3.11"
)
@pytest.mark.parametrize("target", ["p40", "v100", "a100", "h100"])
def test_xla_compiles_update_augmentations_and_step_for_each_gpu(target, compiler, tmp_path):
    """Compiles the update, the augmentations of the papers, and the step of --jit_compile."""
    precision = "float32" if target == "p40" else "mixed_float16"
    assert 4 < len(kernels_of(module("hybrid"), target, compiler, tmp_path)) <= 10
    for name in ("alexnet", "inception", "flash"):
        assert (
            1
            <= len(kernels_of(augmentation_program(name, precision), target, compiler, tmp_path))
            <= 6
        )
    mixing = kernels_of(mixing_program(precision), target, compiler, tmp_path)
    assert 1 <= len(mixing) <= 10, "\n".join(mixing)
    assert len(kernels_of(whole_step(precision), target, compiler, tmp_path)) > 50


@pytest.mark.slow
@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="the compiler is pinned for Python 3.11"
)
@pytest.mark.parametrize("target", ["v100", "a100", "h100"])
def test_stem_program_is_few_kernels_without_scatter(target, compiler, tmp_path):
    for program, most in zip(stem_programs(), (5, 7), strict=True):
        started = kernels_of(program, target, compiler, tmp_path)
        assert 1 < len(started) <= most
        assert not any("scatter" in line for line in started)
        assert not keeps_activations(started)


@pytest.mark.slow
@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="the compiler is pinned for Python 3.11"
)
@pytest.mark.parametrize("case", CASES)
def test_update_after_the_last_all_reduce_is_few_kernels(case, compiler, tmp_path):
    started = kernels_of(module(case), "a100", compiler, tmp_path)
    # Hybrid has three values for each variable, and LAMB a norm that depends on another one.
    largest_counts = {"hybrid": 10, "lamb": 11}
    most = largest_counts.get(case, 9)
    assert 4 < len(started) <= most, "\n".join(started)
