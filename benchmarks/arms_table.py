"""Lists the arms of `python -m benchmarks arms`: command lines, and rules for verdicts."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybrid_imagenet.analysis import published

Row = dict[str, Any]
Judge = Callable[[Row, Row, Row], str]
# Largest relative difference between the mean losses of the first steps of two arms that compute
# the same.
_MAX_LOSS_DIFFERENCE = 1e-3
# A host that waits for nothing is about one step ahead of the device, because the values of the
# schedule wait for the step before.
_MIN_STEPS_AHEAD = 0.5


@dataclasses.dataclass(frozen=True)
class Arm:
    """A measurement: a command line, and a rule for the verdict on its result.

    Attributes:
      name: Unique name, one word.
      words: Arguments of the Python interpreter; `command` replaces {folder}, {steps}, {rounds},
        {peer} and {fashion}.
      rule: What the measurement decides, for the table.
      judge: Returns the verdict; takes the arm's row, the row of `baseline`, and the machine.
      baseline: Name of the arm that it is compared with; empty for none.
      rehearsal_flags: Words that a rehearsal adds.
      gigabytes: GPU memory that it takes at most. While cuDNN tries kernels, this is about twice
        what a step uses.
      exclusive: Whether it warms up while no other arm runs.
      timed: Whether it waits for its turn (`turns.wait_for_turn`); arms that are not timed run
        at the same time.
      seconds: Time that it may take before it is ready, and again after its turn has begun.
      environment: Names and values of variables that are set for it; {out} is replaced by the
        directory of the table, {software} by a name for the GPU and what compiles for it.
    """

    name: str
    words: tuple[str, ...]
    rule: str
    judge: Judge
    baseline: str = ""
    rehearsal_flags: tuple[str, ...] = (
        "--model=resnet8",
        "--model_width=4",
        "--image_size=32",
        "--per_gpu_batch=4",
        "--precision=float32",
    )
    gigabytes: float = 24
    exclusive: bool = False
    timed: bool = True
    seconds: float = 240
    environment: tuple[tuple[str, str], ...] = ()

    def command(self, folder: Path, options: argparse.Namespace) -> list[str]:
        """Returns the words with the values of the options; the results go to the folder."""
        values = {
            "folder": folder,
            "peer": options.peer_python,
            "fashion": options.fashion_mnist,
            "steps": options.steps,
            "rounds": options.rounds,
        }
        words = self.words
        if options.rehearse:
            words += self.rehearsal_flags
        return [word.format(**values) for word in words]

    def missing(self, options: argparse.Namespace) -> str:
        """Returns which option the command line lacks for the arm, or an empty text."""
        uses_fashion_mnist = any("{fashion}" in word for word in self.words)
        if uses_fashion_mnist and not options.fashion_mnist:
            return "needs --fashion_mnist=DIR"
        return ""


def _base(row: Row, other: Row, machine: Row) -> str:
    parts = []
    speeds = published.speeds(machine["key"], "fp16") if machine["key"] else []
    if speeds:
        peer = max(speeds, key=lambda speed: speed.images_per_second)
        share = row["images_per_second"] / peer.images_per_second
        parts.append(
            f"{share:.0%} of the published {peer.images_per_second:,.0f} images/s ({peer.source})"
        )
    parts.append(f"the host is {row['steps_ahead']:.2f} steps ahead")
    if machine["gpu"] and row["steps_ahead"] < _MIN_STEPS_AHEAD:
        parts.append("it waits for the device: look for copies and branches")
    return "; ".join(parts)


def _ratio(row: Row, other: Row, machine: Row) -> str:
    return f"{row['images_per_second'] / other['images_per_second']:.3f} times {other['arm']}"


def _first_steps(row: Row, other: Row, machine: Row) -> str:
    return (
        f"first steps {row['first_seconds']:.1f} s, {other['first_seconds']:.1f} s with"
        f" {other['arm']}"
    )


def _faster(gain: float) -> Judge:
    """Returns a judge that says yes if an arm is faster by a factor, and computes the same.

    The gain must be larger than the noise, and the first losses must agree.
    """

    def judge(row: Row, other: Row, machine: Row) -> str:
        ratio = _ratio(row, other, machine)
        difference = abs(row["first_loss"] - other["first_loss"]) / abs(other["first_loss"])
        if difference > _MAX_LOSS_DIFFERENCE:
            return f"no: losses are {difference:.1e} apart; {ratio}"
        speed = row["images_per_second"]
        other_speed = other["images_per_second"]
        is_faster = speed >= gain * other_speed
        if is_faster and speed <= (1 + machine["noise"]) * other_speed:
            return (
                f"no verdict: {ratio}, and the base itself differs by {machine['noise']:.1%} when"
                " it runs again"
            )
        return f"{_yes(is_faster)}: {ratio}"

    return judge


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _loop(row: Row, other: Row, machine: Row) -> str:
    return (
        f"{_yes(row['ratio'] >= 0.97)}: {row['ratio']:.1%} of the step; a validation image takes"
        f" {row['validation']['share_of_training']:.2f} of a training image's time"
    )


def _exposed(row: Row, other: Row, machine: Row) -> str:
    return f"{1e3 * row['exposed_seconds']:.1f} ms exposed"


def _exposes_less(row: Row, other: Row, machine: Row) -> str:
    is_less = row["exposed_seconds"] <= other["exposed_seconds"]
    return (
        f"{_yes(is_less)}: {_exposed(row, other, machine)}, {_exposed(other, other, machine)} with"
        f" {other['arm']}"
    )


def _gaps(row: Row, other: Row, machine: Row) -> str:
    waits = sum(gap["start"] < row["calls"][-1][1] for gap in row["gaps"])
    lines = "; ".join(
        f"{gap['length']:.2f} ms {gap['before']} -> {gap['after']}" for gap in row["gaps"][:3]
    )
    return (
        f"busy {row['busy']:.1%}; {waits} of the ten longest before the last call returned; {lines}"
    )


def _peer(row: Row, other: Row, machine: Row) -> str:
    ((peer, figures),) = row["peers"].items()
    return (
        f"{peer} has {figures['images_per_second']:,.0f} images/s; ours is {figures['ratio']:.2f}"
        " times as fast"
    )


def _ratio_to_peer(row: Row, other: Row, machine: Row) -> str:
    ours = other["images_per_second"] / row["images_per_second"]
    return f"{other['arm']} is {ours:.3f} times as fast"


def _top1(row: Row, other: Row, machine: Row) -> str:
    return f"top-1 {row['val_top1']:.2%}"


def _same_top1(row: Row, other: Row, machine: Row) -> str:
    difference = abs(row["val_top1"] - other["val_top1"])
    return (
        f"{_yes(difference <= 0.02)}: {_top1(row, other, machine)}, {100 * difference:.2f} points"
        f" from {other['arm']}"
    )


def _passed(row: Row, other: Row, machine: Row) -> str:
    return "yes: the tests passed"


_SCALING = ("--steps={steps}", "--rounds={rounds}", "--")
_STEP = ("--dataset=synthetic_tensors", "--precision=mixed_float16", "--per_gpu_batch=256")
# The step with TensorFlow's own operations. All forms that XLA compiles are compared with it.
_WITHOUT_XLA = ("--nojit_compile", "--nojit_stem")
# The flags that a run on one GPU has by default.
_DEFAULT = ("--jit_compile", "--jit_stem")
# TensorFlow's own variable: XLA keeps the programs that it has compiled for GPUs. It looks them up
# by the operations alone, so each GPU, driver, TensorFlow and cuDNN needs its own directory.
_XLA_CACHE = (
    (
        "TF_XLA_FLAGS",
        "--tf_xla_persistent_cache_directory={out}/xla-cache-{software}"
        " --tf_xla_persistent_cache_device_types=GPU",
    ),
)
# XLA starts its kernels one by one instead of several at once by a command buffer.
_WITHOUT_COMMAND_BUFFERS = (("XLA_FLAGS", "--xla_gpu_enable_command_buffer="),)
# Several ranks may share a GPU.
_SHARED = (("NCCL_MULTI_RANK_GPU_ENABLE", "1"),)


def _step(name: str, rule: str, judge: Judge, *flags: str, ranks: int = 1, **more: Any) -> Arm:
    """Returns an arm that times the step.

    Args:
      name: Name of the arm.
      rule: What it decides.
      judge: Returns the verdict.
      *flags: Flags of training that replace those of the arm "base".
      ranks: Number of ranks that share one GPU.
      **more: Other attributes of the arm.
    """
    words: tuple[str, ...] = ("-m", "benchmarks.scaling_in_turn")
    more.setdefault("baseline", "" if name == "base" else "base")
    if ranks > 1:
        words = ("-m", "hybrid_imagenet", "run", "-np", str(ranks), "-H", f"localhost:{ranks}")
        words += ("--module=benchmarks.scaling_in_turn", "--")
        more["environment"] = (*_SHARED, *more.get("environment", ()))
    return Arm(name, (*words, *_SCALING, *_STEP, *_WITHOUT_XLA, *flags), rule, judge, **more)


def _peer_arm(
    name: str, benchmark: Sequence[str], judge: Judge, *, python_flag: str, baseline: str = ""
) -> Arm:
    """Returns an arm that times an implementation in another framework.

    Args:
      name: Name of the implementation.
      benchmark: Name and first words of the benchmark that times it.
      judge: Returns the verdict.
      python_flag: The flag of the benchmark that sets the interpreter.
      baseline: Name of the arm that it is compared with.
    """
    words = (
        "-m",
        "benchmarks",
        *benchmark,
        f"{python_flag}={{peer}}",
        "--batch=256",
        "--precision=mixed_float16",
        "--steps={steps}",
        "--rounds={rounds}",
        "--json={folder}/row.json",
    )
    rehearsal_flags = ("--image_size=32", "--batch=2", "--precision=float32")
    return Arm(
        name,
        words,
        "the peers' column",
        judge,
        baseline=baseline,
        rehearsal_flags=rehearsal_flags,
        gigabytes=60,
    )


def _peer_in_turns(peer: str) -> Arm:
    """Returns an arm that times a peer and this program in turns."""
    return _peer_arm(peer, ("step", f"--peers={peer}"), _peer, python_flag="--torch_python")


def _peer_alone(peer: str) -> Arm:
    """Returns an arm that times an implementation of the whole recipe.

    It is compared with what this program runs by default.
    """
    return _peer_arm(
        peer,
        ("peer", f"--peer={peer}"),
        _ratio_to_peer,
        python_flag="--python",
        baseline="jit_stem",
    )


def _trained(
    name: str,
    rule: str,
    judge: Judge,
    flags: Sequence[str],
    rehearsal_flags: tuple[str, ...],
    **more: Any,
) -> Arm:
    words = ("-m", "hybrid_imagenet.main", *flags, "--run_dir={folder}/run", "--progress=plain")
    return Arm(name, words, rule, judge, rehearsal_flags=rehearsal_flags, timed=False, **more)


_DIGITS = (
    "--dataset=digits",
    "--augmentation=digits",
    "--model=resnet10",
    "--image_size=24",
    "--precision=float32",
    "--compression=none",
    "--per_gpu_batch=188",
    "--virtual_gpus=2",
    "--eval_batch=150",
    "--epochs=12",
    "--warmup_epochs=5",
    "--lr=1.2",
    "--lr_decay=0.8",
    "--lars_eta=0.004",
    "--target_top1=0.9",
    "--seed=1",
)
_SHORT = ("--epochs=1", "--warmup_epochs=0.5")
_LU_FASHION = (
    "--recipe=hybrid",
    "--dataset=fashion_mnist",
    "--data_dir={fashion}",
    "--augmentation=shift",
    "--model=resnet50",
    "--stem=3x3_stride2",
    "--image_size=28",
    "--virtual_gpus=24",
    "--per_gpu_batch=256",
    "--eval_batch=1000",
    "--epochs=90",
    "--warmup_epochs=10",
    "--checkpoint_every_epochs=90",
    "--precision=mixed_float16",
)
_LOOP = (
    "-m",
    "benchmarks",
    "loop",
    "--steps={steps}",
    "--rounds={rounds}",
    "--json={folder}/row.json",
    "--",
    "--dataset=synthetic",
    "--num_examples=51200",
    "--num_classes=1000",
    "--stall_timeout=0",
    *_STEP[1:],
)
_TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
_FASTER = "the default if it is 2 % faster"
_LU = "Table 3.2 of Lu et al.: {:,.0f} on a V100"

ARMS = (
    _step(
        "base",
        "the published peer; the host waits if it is not half a step ahead",
        _base,
        exclusive=True,
    ),
    _step(
        "onednn",
        "on with GPUs if 2 % faster and losses agree",
        _faster(1.02),
        exclusive=True,
        environment=(("TF_ENABLE_ONEDNN_OPTS", "1"),),
    ),
    _step(
        "stem",
        "the default of --jit_stem if 1 % faster",
        _faster(1.01),
        "--jit_stem",
        exclusive=True,
    ),
    _step(
        "jit_compile",
        "default if 3 % faster; note its first steps",
        _faster(1.03),
        "--jit_compile",
        exclusive=True,
    ),
    _step(
        "jit_stem",
        "what one GPU runs by default; the goal is 1.05",
        _faster(1.05),
        *_DEFAULT,
        exclusive=True,
    ),
    _step("bf16", "docs", _ratio, "--precision=mixed_bfloat16", exclusive=True),
    _step(
        "bf16_jit",
        "the goal is 0.95 of jit_stem",
        _ratio,
        *_DEFAULT,
        "--precision=mixed_bfloat16",
        baseline="jit_stem",
        exclusive=True,
    ),
    _step(
        "jit_cache",
        "writes the cache of jit_cached",
        _first_steps,
        *_DEFAULT,
        baseline="jit_stem",
        exclusive=True,
        environment=_XLA_CACHE,
    ),
    _step(
        "jit_cached",
        "the cache of XLA becomes a default if the first steps take half the time",
        _first_steps,
        *_DEFAULT,
        baseline="jit_cache",
        exclusive=True,
        environment=_XLA_CACHE,
    ),
    _step(
        "jit_nocb",
        "command buffers stay on if they are faster",
        _ratio,
        *_DEFAULT,
        baseline="jit_stem",
        exclusive=True,
        environment=_WITHOUT_COMMAND_BUFFERS,
    ),
    _peer_alone("jax_full"),
    _peer_alone("jax_full_bytes"),
    Arm(
        "gaps",
        ("-m", "benchmarks", "gaps", "--json={folder}/row.json", "--", *_STEP),
        "what waits, where calls of the step wait",
        _gaps,
        exclusive=True,
    ),
    _step("again", "smaller differences than this are noise", _ratio, exclusive=True),
    _step("512", "docs", _ratio, "--per_gpu_batch=512", gigabytes=48),
    _step(
        "jit_512",
        "docs",
        _ratio,
        *_DEFAULT,
        "--per_gpu_batch=512",
        baseline="jit_stem",
        gigabytes=48,
    ),
    _step("lars", "the planner", _ratio, "--optimizer=lars"),
    _step("muon", "the planner", _ratio, "--optimizer=muon"),
    _step("tf32", "docs", _ratio, "--precision=float32", gigabytes=44),
    _step(
        "tf32_stem",
        "the default of --jit_stem in FP32 if 1 % faster than tf32",
        _faster(1.01),
        "--jit_stem",
        "--precision=float32",
        baseline="tf32",
        gigabytes=44,
    ),
    _step("1024", "docs", _ratio, "--per_gpu_batch=1024", gigabytes=94),
    _step("flash", "the planner", _ratio, "--augmentation=flash"),
    _step(
        "inception32",
        "the planner",
        _ratio,
        "--augmentation=inception",
        "--per_gpu_batch=32",
        gigabytes=6,
    ),
    _step("threads1", _FASTER, _faster(1.02), environment=(("TF_GPU_THREAD_COUNT", "1"),)),
    _step("threads4", _FASTER, _faster(1.02), environment=(("TF_GPU_THREAD_COUNT", "4"),)),
    _step(
        "lu_fp16_128",
        _LU.format(published.LU_SINGLE_V100["fp16", 128]),
        _ratio,
        "--per_gpu_batch=128",
    ),
    _step(
        "lu_tf32_128",
        _LU.format(published.LU_SINGLE_V100["fp32", 128]),
        _ratio,
        "--precision=float32",
        "--per_gpu_batch=128",
    ),
    Arm("loop", _LOOP, "the loop with JPEGs has 97 % of the step", _loop),
    _step("ranks2", "docs", _exposed, "--per_gpu_batch=128", ranks=2, gigabytes=60),
    _step(
        "ranks2_sync",
        "asynchronous completion goes if this exposes less",
        _exposes_less,
        "--per_gpu_batch=128",
        ranks=2,
        gigabytes=60,
        baseline="ranks2",
        environment=(("HOROVOD_ENABLE_ASYNC_COMPLETION", "0"),),
    ),
    _step(
        "ranks2_tensorflow",
        "recommended if it exposes less than Horovod",
        _exposes_less,
        "--per_gpu_batch=128",
        "--engine=tensorflow",
        ranks=2,
        gigabytes=60,
        baseline="ranks2",
    ),
    _step("ranks4", "docs", _exposed, "--per_gpu_batch=64", ranks=4, gigabytes=80),
    Arm(
        "sums",
        (
            *_TESTS,
            "tests/comm/test_algorithms.py",
            "tests/comm/test_gradients_on_ranks.py",
            "-k",
            "not tensorflow",
        ),
        "each all-reduce of Horovod is within the rounding of FP64",
        _passed,
        rehearsal_flags=("-k", "sum_like_the_ring and not tensorflow"),
        gigabytes=30,
        timed=False,
        environment=_SHARED,
    ),
    Arm(
        "resume",
        (*_TESTS, "tests/checkpoints/test_exact_resume.py"),
        "two ranks, killed and resumed, end with the same bits",
        _passed,
        rehearsal_flags=("-k", "killed_and_resumed"),
        gigabytes=30,
        timed=False,
        environment=_SHARED,
    ),
    _trained(
        "digits_cpu",
        "what digits_gpu is compared with",
        _top1,
        _DIGITS,
        _SHORT,
        gigabytes=0,
        environment=(("CUDA_VISIBLE_DEVICES", ""),),
    ),
    _trained(
        "digits_gpu",
        "within 2 points of the CPU",
        _same_top1,
        _DIGITS,
        _SHORT,
        baseline="digits_cpu",
    ),
    _peer_in_turns("torch_compiled"),
    _peer_in_turns("jax"),
    _trained(
        "lu_fashion",
        "Lu et al. in full form on Fashion-MNIST: docs",
        _top1,
        _LU_FASHION,
        ("--max_steps=1", "--precision=float32", "--per_gpu_batch=8"),
        gigabytes=60,
        seconds=3600,
    ),
)

SPEED = (
    "base",
    "stem",
    "jit_stem",
    "again",
    "jax_full",
    "jax_full_bytes",
    "jit_cache",
    "jit_cached",
    "jit_nocb",
    "bf16_jit",
    "bf16",
    "jit_512",
    "tf32",
    "tf32_stem",
)
"""The arms of `--only=speed`, those of most value first: forms of the step, and JAX."""
