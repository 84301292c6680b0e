"""A step copies no tensor between host and GPU except the schedule's scalars (see copies.py).

registrations.json lists the memory in which TensorFlow's kernels keep their arguments, for the
operations and types of these graphs. With --long it is compared with the CUDA wheel, which lists
its kernels without a GPU.
"""

import json
import os
import pathlib
import subprocess
import sys

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf

from hybrid_imagenet.data import device
from hybrid_imagenet.optimizers.accumulation import MicroBatchUse
from hybrid_imagenet.optimizers.hyperparameters import HYPERPARAMETERS
from tests.gpu import copies, graphs

HERE = pathlib.Path(__file__).parent
EVERYTHING = ("--recipe=hybrid", "--ema_decay=0.99", "--label_smoothing=0.1")
MIXED = ("--mixup_alpha=0.2", "--cutmix_alpha=1", "--class_weights=balanced", "--clip_norm=1")
# Each value holds flags and the engine that connects two ranks, or an empty string for one rank.
STEPS = {
    "one rank": (EVERYTHING, ""),
    "two ranks": (("--recipe=hybrid",), "horovod"),
    "two ranks of TensorFlow's engine": ((), "tensorflow"),
    "accumulation": (("--gradient_accumulation_steps=2", "--optimizer=lars"), "horovod"),
    "classes by themselves": (("--loss=sigmoid", "--optimizer=sgd", "--batch_norm=moving"), ""),
    "statistics over ranks": (("--sync_batch_norm", "--optimizer=lamb"), "horovod"),
    "virtual GPUs": (("--virtual_gpus=2", "--optimizer=muon", *MIXED), ""),
}
LONG = {
    "without XLA": ((), "horovod"),
    "bfloat16 on the way": (("--compression=bf16",), "horovod"),
    "compiled": (("--jit_compile",), "horovod"),
}
EVALUATIONS = {"softmax": ("--eval_flip",), "sigmoid": ("--loss=sigmoid",)}
AUGMENTATIONS = graphs.augmentations()


def is_allowed(copy):
    """Returns whether a copy transfers the schedule's scalars.

    It starts when a step begins, so it waits only for earlier steps.
    """
    return copy.kind == "early feed" and (copy.dtype, copy.bytes) == (
        "float32",
        4 * len(HYPERPARAMETERS),
    )


def check(*audits, returns=False):
    """Checks that there is no copy except the allowed ones.

    `returns` is for functions with a result, which waits for the whole step: there the host also
    sends empty copies when the step begins.
    """
    for audit in audits:
        assert not audit.missing
        forbidden = [copy for copy in sorted(audit.copies) if not is_allowed(copy)]
        assert not [
            str(copy)
            for copy in forbidden
            if not returns or (copy.kind, copy.dtype) != ("early feed", "control")
        ]
    return audits


def steps(case, table, precision="mixed_float16"):
    flags, ranks = (STEPS | LONG)[case]
    with graphs.on_gpu(xla="without" not in case) as on_cpu:
        traced = list(graphs.training(graphs.resolved(*flags), ranks, precision))
        return [graphs.audited(function, on_cpu, table) for _, function in traced]


def evaluation(case, table, precision="mixed_float16"):
    with graphs.on_gpu() as on_cpu:
        return graphs.audited(
            graphs.evaluation(graphs.resolved(*EVALUATIONS[case]), precision), on_cpu, table
        )


def augmentation(name, compiled, table):
    with graphs.on_gpu(xla=compiled) as on_cpu:
        return graphs.audited(graphs.augmentation(name), on_cpu, table)


def fit(inner, compiled, table, micro_batch=None, precision="mixed_float16"):
    with graphs.on_gpu() as on_cpu:
        traced = graphs.fit(inner, compiled=compiled, micro_batch=micro_batch, precision=precision)
        return graphs.audited(traced, on_cpu, table)


@pytest.fixture(scope="module")
def table():
    return copies.table()


@pytest.mark.parametrize("case", STEPS)
def test_training_step_copies_only_the_scalars_of_the_schedule(case, table):
    assert len(check(*steps(case, table))) == 1 + (case == "accumulation")


@pytest.mark.parametrize("case", EVALUATIONS)
def test_validation_step_copies_nothing(case, table):
    (audit,) = check(evaluation(case, table))
    assert not audit.copies


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_augmentation_on_the_device_copies_nothing(name, table):
    (audit,) = check(augmentation(name, True, table))
    assert not audit.copies


@pytest.mark.parametrize(
    ("inner", "compiled", "precision"),
    # The loss scale of float32 follows the norm of the gradients.
    [("sgd", True, "mixed_float16"), ("adam", False, "float32")],
)
def test_fit_step_copies_nothing(inner, compiled, precision, table):
    check(fit(inner, compiled, table, precision=precision), returns=True)


@pytest.mark.parametrize("micro_batch", MicroBatchUse)
def test_fit_step_with_accumulation_copies_nothing_and_has_no_branch(micro_batch, table):
    check(fit("sgd", False, table, micro_batch), returns=True)
    with graphs.on_gpu():
        graph = graphs.fit("sgd", compiled=False, micro_batch=micro_batch).graph
    assert not {"If", "StatelessIf"} & {op.type for op in graph.get_operations()}


def everything(precision, table=None):
    """Returns the audits of all graphs; without a table they only list operations."""
    audits = [audit for case in STEPS | LONG for audit in steps(case, table, precision)]
    audits += [evaluation(case, table, precision) for case in EVALUATIONS]
    if precision == "mixed_float16":
        audits += [
            augmentation(name, compiled, table)
            for name in AUGMENTATIONS
            for compiled in (True, False)
        ]
        audits += [
            fit(inner, compiled, table) for inner in ("sgd", "adam") for compiled in (True, False)
        ]
        audits += [fit("sgd", False, table, micro_batch) for micro_batch in MicroBatchUse]
    if precision == "float32":
        audits.append(fit("adam", False, table, precision=precision))
    return audits


def registered(operations, cuda_wheel):
    """Returns what the CUDA wheel registers for operations, in the form of the table."""
    environment = os.environ | {"PYTHONPATH": str(cuda_wheel), "TF_CPP_MIN_LOG_LEVEL": "3"}
    program = [sys.executable, str(HERE / "registered.py")]
    text = json.dumps([[kind, types] for (kind, _), types in sorted(operations.items())])
    done = subprocess.run(
        program, input=text, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_registrations_equal_the_cuda_wheel_and_no_precision_copies(cuda_wheel, tmp_path):
    operations = {}
    for precision in ("mixed_float16", "mixed_bfloat16", "float32"):
        for audit in everything(precision):
            operations |= audit.seen
    for case in COPY_CASES:
        operations |= audit_case(case, None).seen
    text = registered(operations, cuda_wheel)
    (tmp_path / copies.TABLE.name).write_text(text)
    assert json.loads(text) == copies.table(), (
        f"copy {tmp_path / copies.TABLE.name} to {copies.TABLE}"
    )
    for precision in ("mixed_float16", "mixed_bfloat16", "float32"):
        check(*everything(precision, copies.table()), returns=True)


def test_training_step_of_resnet50_starts_few_kernels(table):
    """It was 598 operations before casts, statistics, metrics and gradients were fused."""
    with graphs.on_gpu() as on_cpu:
        config = graphs.resolved("--model=resnet50", "--model_width=64", "--image_size=64")
        ((_, step),) = graphs.training(config)
        launched = graphs.audited(step, on_cpu, table).launched
    layers = sum(name.startswith(("Conv2D", "FusedBatchNorm", "Relu", "Add")) for name in launched)
    # These are convolutions, normalizations, ReLUs and sums, forward and backward. The stem is two
    # programs instead.
    assert layers == 390
    assert len(launched) - layers <= 32
    first = next(op for op in step.graph.get_operations() if op.type == "Conv2D")
    # The reshape gives a static shape to the graph optimizer.
    assert first.inputs[0].op.type == "Reshape"


@pytest.mark.slow
def test_training_step_fuses_every_relu_with_a_normalization(cuda_wheel):
    """Runs without oneDNN, as TensorFlow does if there is a GPU.

    With oneDNN, TensorFlow fuses none of the 96 ReLUs on hosts without AVX512-FP16.
    """
    environment = os.environ | {
        "PYTHONPATH": f"{cuda_wheel}:{HERE.parents[1]}",
        "TF_ENABLE_ONEDNN_OPTS": "0",
    }
    program = [sys.executable, "-m", "tests.gpu.fused"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=600)
    assert json.loads(done.stdout) == {
        "Relu": 0,
        "ReluGrad": 0,
        "_FusedBatchNormEx": 48,
        "_FusedBatchNormGradEx": 48,
        "wrong shapes": [],
    }, done.stderr


def spec(dtype, *shape, name="x"):
    return tf.TensorSpec(shape, dtype, name)


def clock(x):
    y = x * 2.0
    with tf.control_dependencies([y]), tf.device("CPU:0"):
        tf.timestamp()


def word(x):
    return hvd.allreduce(x, op=hvd.Sum, name="word")


def word_of_the_host(x):
    with tf.device("CPU:0"):
        return word(x)


def branch(x, early=None):
    return tf.cond(x[0] > 0.0 if early is None else early, lambda: x + 1.0, lambda: x * 2.0)


@tf.function(autograph=False, jit_compile=True)
def rounded(x):
    return tf.cast(x, tf.int32) if x.dtype == tf.float32 else tf.cast(x, tf.float32)


def moved(x, fill):
    shift = tf.constant([[1.0, 0.0, 3.0, 0.0, 1.0, 0.0, 0.0, 0.0]])
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=x, transforms=shift, output_shape=[8, 8], fill_value=fill(), interpolation="NEAREST"
    )


PIXELS = spec("float32", 1, 8, 8, 3)
SCORES = spec("float32", 4, 9, name="scores")
# Forms that steps had once, and the forms that replaced them. Each value holds a function, its
# arguments, the names of arguments on the host, and the expected copies.
COPY_CASES = {
    "int32 compared": (
        lambda x, y: tf.equal(tf.argmax(y, 1, output_type=tf.int32), x),
        (spec("int32", 4), SCORES),
        (),
        [("feed", "bool"), ("fetch", "int32"), ("fetch", "int32")],
    ),
    "int64 compared": (
        lambda x, y: tf.equal(tf.argmax(y, 1), x),
        (spec("int64", 4), SCORES),
        (),
        [],
    ),
    "bytes gathered": (
        lambda x: tf.cast(tf.gather(x, tf.constant([0, 2], tf.int64)), tf.float32),
        (spec("uint8", 4),),
        (),
        [("feed", "uint8"), ("fetch", "uint8")],
    ),
    "clock": (clock, (spec("float32", 4),), (), [("fetch", "control")]),
    "word summed by GPUs": (
        word,
        (spec("int32", 3),),
        ["x"],
        [("early feed", "int32"), ("fetch", "int32")],
    ),
    "word summed by hosts": (word_of_the_host, (spec("int32", 3),), ["x"], []),
    "branch on a value": (
        branch,
        (spec("float32", 4),),
        (),
        [("branch", "bool"), ("fetch", "bool")],
    ),
    "integers of a compiled function": (
        lambda x: rounded(rounded(x)),
        (spec("float32", 4),),
        (),
        [("fetch", "int32")],
    ),
    "branch of the host": (
        branch,
        (spec("float32", 4), spec("bool", name="early")),
        ["early"],
        [("branch", "bool")],
    ),
    "constant in the GPU's memory": (
        lambda x: moved(x, lambda: 0.0),
        (PIXELS,),
        (),
        [("fetch", "float32")],
    ),
    "constant in the host's": (lambda x: moved(x, device._black), (PIXELS,), (), []),
}


def audit_case(case, table):
    function, arguments, host, _ = COPY_CASES[case]
    with graphs.on_gpu() as on_cpu:
        traced = tf.function(function, autograph=False).get_concrete_function(*arguments)
        return copies.Audit(on_cpu, table).step(traced, host)


@pytest.mark.parametrize("case", COPY_CASES)
def test_audit_finds_the_copies_of_each_case(case, table):
    assert (
        sorted((copy.kind, copy.dtype) for copy in audit_case(case, table).copies)
        == COPY_CASES[case][3]
    )
