"""How many kernels an A100 starts from the last all-reduce to the end of a step, by XLA's own compiler for it.

The compiler is that of JAX's CUDA plugin, installed once in the user's cache; it is of another version than that in
TensorFlow, so counts may differ by one or two.
"""

import math
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.optimizer import resnet50_shapes
from hybrid_imagenet import optimizers
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.comm.fusion import pack
from hybrid_imagenet.numerics.packing import ROW, padded
from hybrid_imagenet.optimizers.base import HYPER_NAMES
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.optimizers.kinds import classify_by_rank
from hybrid_imagenet.optimizers.layout import Layout
from hybrid_imagenet.optimizers.loss_scale import LossScale

HERE = pathlib.Path(__file__).parent
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "hybrid_imagenet" / "kernels"
CASES = {
    "sgd": ({"optimizer": "sgd", "weight_decay": 1e-4}, 0),
    "lars": ({"optimizer": "lars"}, 0),
    "adabound": ({"optimizer": "adabound"}, 0),
    "hybrid, warmup": ({"optimizer": "hybrid"}, 0),
    "hybrid, SGD with LARS": ({"optimizer": "hybrid"}, 1),
    "lamb": ({"optimizer": "lamb"}, 0),
    "schedule-free": ({"optimizer": "schedule_free"}, 0),
}


@pytest.fixture(scope="module")
def compiler():
    """The environment in which compiled.py runs."""
    folder = CACHE / "xla"
    if not (folder / "jax").exists():
        install = [sys.executable, "-m", "pip", "install", "--no-deps", "--require-hashes", "--target", str(folder)]
        subprocess.run([*install, "-r", str(HERE / "compiler.txt")], check=True, capture_output=True)
    return os.environ | {"PYTHONPATH": str(folder)}


def module(arguments, phase):
    """The compiled program behind the last all-reduce of ResNet-50's gradients in FP16, as serialized HLO."""
    shapes = resnet50_shapes()
    elements = [math.prod(shape) for shape in shapes]
    variables = [keras.Variable(np.zeros(shape, np.float32)) for shape in shapes]
    inner = optimizers.create(**arguments)
    inner.set_kinds(classify_by_rank(variables))
    optimizer = DistributedOptimizer(inner, SingleProcess(), LossScale(8.0, dynamic=True), flat=True)
    optimizer.build(variables)
    buckets = pack(range(len(shapes))[::-1], elements, ["float16"] * len(shapes), 16 << 20, 4 << 20)
    layout, update = Layout(shapes, [m for b in buckets for m in b.members]), optimizer._flat
    spec = tf.TensorSpec
    rows = spec([layout.rows, ROW], tf.float32)
    kept = dict.fromkeys(update._kept(phase), rows)
    scalars = (
        spec([len(HYPER_NAMES)], tf.float32),
        spec([], tf.float32),
        [spec([], tf.int64) for _ in update._counted(phase)],
        [spec([], tf.float32) for _ in inner.totals],
    )
    early = tf.function(lambda *values: update.before(phase, layout, *values), autograph=False)
    before = early.get_concrete_function(rows, *scalars).structured_outputs
    received = [spec([sum(padded(n) for n in b.elements)], tf.float16) for b in buckets]
    arguments = received, kept, tf.nest.map_structure(lambda v: spec(v.shape, v.dtype), before), *scalars
    flat = tf.nest.flatten(arguments)

    def program(*values):
        return update.after(phase, layout, *tf.nest.pack_sequence_as(arguments, values))

    compiled = tf.function(program, autograph=False, jit_compile=True)
    return compiled.experimental_get_compiler_ir(*flat)(stage="hlo_serialized")


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the compiler is pinned for Python 3.11")
@pytest.mark.parametrize("case", CASES)
def test_fewer_than_ten_kernels_follow_the_last_all_reduce(case, compiler, tmp_path):
    (tmp_path / "module.pb").write_bytes(module(*CASES[case]))
    command = [sys.executable, str(HERE / "compiled.py"), str(tmp_path / "module.pb")]
    done = subprocess.run(command, env=compiler, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    started = done.stdout.splitlines()
    most = 11 if case == "lamb" else 9  # its second norm, of the update, has to wait for the first
    assert 4 < len(started) <= most, "\n".join(started)
