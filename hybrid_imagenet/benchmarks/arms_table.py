"""Lists the arms of `bench gpu --arms`: command lines, and rules for verdicts."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybrid_imagenet.analysis import published

Row = dict[str, Any]
Judge = Callable[[Row, Row, Row], str]
_LOSSES_AGREE = 1e-3  # relative, of the mean over the first steps
# steps; a host that waits for nothing is one ahead, as the schedule's values wait for the step
# before
_AHEAD = 0.5


@dataclasses.dataclass(frozen=True)
class Arm:
    """One thing to find out.

    Attributes:
      name: a word, unique.
      words: the command line behind the interpreter; {folder}, {steps}, {rounds}, {peer}, {fashion}
      are filled in.
      rule: what is decided by it, as the table prints it.
      judge: returns the verdict; takes the arm's row, the row of `than`, and the machine.
      than: the arm that it is compared with; empty for none.
      small: what a rehearsal adds to the words.
      gigabytes: of GPU memory that it takes at most: cuDNN tries kernels with some twice what a
      step uses.
      alone: whether it warms up while no other arm runs.
      timed: whether it waits for its turn (`scaling.wait_for_turn`); arms that are not timed run
        at the same time.
      seconds: it may take before it is ready, and again from its turn on.
      environment: variables that it gets; {out} is the directory of the table.
    """

    name: str
    words: tuple[str, ...]
    rule: str
    judge: Judge
    than: str = ""
    small: tuple[str, ...] = (
        *(
            "--model=resnet8",
            "--model_width=4",
            "--image_size=32",
            "--per_gpu_batch=4",
            "--precision=float32",
        ),
    )
    gigabytes: float = 24
    alone: bool = False
    timed: bool = True
    seconds: float = 240
    environment: tuple[tuple[str, str], ...] = ()

    def command(self, folder: Path, options: argparse.Namespace) -> list[str]:
        """The words with what this start is about; its results go to the folder."""
        values = {"folder": folder, "peer": options.peer_python, "fashion": options.fashion_mnist}
        values |= {"steps": options.steps, "rounds": options.rounds}
        return [
            word.format(**values)
            for word in [*self.words, *(self.small if options.rehearse else ())]
        ]

    def missing(self, options: argparse.Namespace) -> str:
        """Returns what the command line lacks for the arm, or an empty text."""
        wanted = any("{fashion}" in word for word in self.words)
        return "needs --fashion_mnist=DIR" if wanted and not options.fashion_mnist else ""


def _base(row: Row, other: Row, machine: Row) -> str:
    said = []
    if speeds := published.speeds(machine["key"], "fp16") if machine["key"] else []:
        peer = max(speeds, key=lambda speed: speed.images_per_second)
        share = row["images_per_second"] / peer.images_per_second
        said = [
            f"{share:.0%} of the published {peer.images_per_second:,.0f} images/s ({peer.source})"
        ]
    said.append(f"the host is {row['steps_ahead']:.2f} steps ahead")
    if machine["gpu"] and row["steps_ahead"] < _AHEAD:
        said.append("it waits for the device: look for copies and branches")
    return "; ".join(said)


def _ratio(row: Row, other: Row, machine: Row) -> str:
    return f"{row['images_per_second'] / other['images_per_second']:.3f} times {other['arm']}"


def _first_steps(row: Row, other: Row, machine: Row) -> str:
    here, there = row["first_seconds"], other["first_seconds"]
    return f"first steps {here:.1f} s, {there:.1f} s with {other['arm']}"


def _faster(gain: float) -> Judge:
    """Yes if it is faster by a factor, and by more than the noise, and its first losses agree."""

    def judge(row: Row, other: Row, machine: Row) -> str:
        said = _ratio(row, other, machine)
        apart = abs(row["first_loss"] - other["first_loss"]) / abs(other["first_loss"])
        if apart > _LOSSES_AGREE:
            return f"no: losses are {apart:.1e} apart; {said}"
        faster = row["images_per_second"] >= gain * other["images_per_second"]
        if (
            faster
            and row["images_per_second"] <= (1 + machine["noise"]) * other["images_per_second"]
        ):
            return (
                f"no verdict: {said}, and the base itself differs by {machine['noise']:.1%} when it"
                " runs again"
            )
        return f"{_yes(faster)}: {said}"

    return judge


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _loop(row: Row, other: Row, machine: Row) -> str:
    said = (
        f"{row['ratio']:.1%} of the step; a validation image takes"
        f" {row['validation']['share_of_training']:.2f}"
    )
    return f"{_yes(row['ratio'] >= 0.97)}: {said} of a training image's time"


def _exposed(row: Row, other: Row, machine: Row) -> str:
    return f"{1e3 * row['exposed_seconds']:.1f} ms exposed"


def _exposes_less(row: Row, other: Row, machine: Row) -> str:
    said = f"{_exposed(row, other, machine)}, {_exposed(other, other, machine)} with {other['arm']}"
    return f"{_yes(row['exposed_seconds'] <= other['exposed_seconds'])}: {said}"


def _gaps(row: Row, other: Row, machine: Row) -> str:
    waits = sum(gap["start"] < row["calls"][-1][1] for gap in row["gaps"])
    lines = "; ".join(
        f"{gap['length']:.2f} ms {gap['before']} -> {gap['after']}" for gap in row["gaps"][:3]
    )
    return (
        f"busy {row['busy']:.1%}; {waits} of the ten longest before the last call returned; {lines}"
    )


def _peer(row: Row, other: Row, machine: Row) -> str:
    if not row["peers"]:
        return "not installed: give --peer_python"
    ((peer, figures),) = row["peers"].items()
    return (
        f"{peer} has {figures['images_per_second']:,.0f} images/s; ours is {figures['ratio']:.2f}"
        " times as fast"
    )


def _ratio_to_peer(row: Row, other: Row, machine: Row) -> str:
    if row.get("skipped"):
        return "not installed: give --peer_python"
    ours = other["images_per_second"] / row["images_per_second"]
    return f"{other['arm']} is {ours:.3f} times as fast"


def _top1(row: Row, other: Row, machine: Row) -> str:
    return f"top-1 {row['val_top1']:.2%}"


def _same_top1(row: Row, other: Row, machine: Row) -> str:
    apart = abs(row["val_top1"] - other["val_top1"])
    return (
        f"{_yes(apart <= 0.02)}: {_top1(row, other, machine)}, {100 * apart:.2f} points from"
        f" {other['arm']}"
    )


def _passed(row: Row, other: Row, machine: Row) -> str:
    return "yes: the tests passed"


_SCALING = ("scaling", "--worker", "--steps={steps}", "--rounds={rounds}", "--")
_STEP = ("--dataset=synthetic_tensors", "--precision=mixed_float16", "--per_gpu_batch=256")
# The step of TensorFlow's operations, which all forms by XLA are compared with.
_WITHOUT_XLA = ("--nojit_compile", "--xla_programs=")
# What one GPU runs by default.
_DEFAULT = ("--jit_compile", "--xla_programs=stem")
_XLA_CACHE = (("HYBRID_IMAGENET_XLA_CACHE", "{out}/xla-cache"),)
_SHARED = (("NCCL_MULTI_RANK_GPU_ENABLE", "1"),)


def _step(name: str, rule: str, judge: Judge, *flags: str, ranks: int = 1, **more: Any) -> Arm:
    """Returns an arm that times the step with some flags, which replace those of the base.

    Several ranks share a GPU.
    """
    words: tuple[str, ...] = ("-m", "hybrid_imagenet.benchmarks")
    more.setdefault("than", "" if name == "base" else "base")
    if ranks > 1:
        words = ("-m", "hybrid_imagenet", "run", "-np", str(ranks), "-H", f"localhost:{ranks}")
        words += ("--module=hybrid_imagenet.benchmarks", "--")
        more["environment"] = (*_SHARED, *more.get("environment", ()))
    return Arm(name, (*words, *_SCALING, *_STEP, *_WITHOUT_XLA, *flags), rule, judge, **more)


def _against(peer: str) -> Arm:
    words = (
        "-m",
        "hybrid_imagenet.benchmarks",
        "step",
        "--batch=256",
        "--precision=mixed_float16",
        f"--peers={peer}",
        "--torch_python={peer}",
        "--steps={steps}",
        "--rounds={rounds}",
        "--json={folder}/row.json",
    )
    small = ("--image_size=32", "--batch=2", "--precision=float32")
    return Arm(peer, words, "the peers' column", _peer, small=small, gigabytes=60)


def _alone(peer: str) -> Arm:
    """An arm that times an implementation of the whole recipe, next to this program's default."""
    words = (
        "-m",
        "hybrid_imagenet.benchmarks",
        "peer",
        f"--peer={peer}",
        "--python={peer}",
        "--batch=256",
        "--precision=mixed_float16",
        "--steps={steps}",
        "--rounds={rounds}",
        "--json={folder}/row.json",
    )
    small = ("--image_size=32", "--batch=2", "--precision=float32")
    return Arm(
        peer, words, "the peers' column", _ratio_to_peer, than="jit_stem", small=small, gigabytes=60
    )


def _trained(
    name: str, rule: str, judge: Judge, flags: Sequence[str], small: tuple[str, ...], **more: Any
) -> Arm:
    words = ("-m", "hybrid_imagenet.main", *flags, "--run_dir={folder}/run", "--progress=plain")
    return Arm(name, words, rule, judge, small=small, timed=False, **more)


_DIGITS = (
    *(
        "--dataset=digits",
        "--augmentation=digits",
        "--model=resnet10",
        "--image_size=24",
        "--precision=float32",
    ),
    *(
        "--compression=none",
        "--per_gpu_batch=188",
        "--virtual_gpus=2",
        "--eval_batch=150",
        "--epochs=12",
    ),
    *(
        "--warmup_epochs=5",
        "--lr=1.2",
        "--lr_decay=0.8",
        "--lars_eta=0.004",
        "--target_top1=0.9",
        "--seed=1",
    ),
)
_SHORT = ("--epochs=1", "--warmup_epochs=0.5")
_LU_FASHION = (
    *(
        "--recipe=hybrid",
        "--dataset=fashion_mnist",
        "--data_dir={fashion}",
        "--augmentation=shift",
        "--model=resnet50",
    ),
    *(
        "--stem=3x3_stride2",
        "--image_size=28",
        "--virtual_gpus=24",
        "--per_gpu_batch=256",
        "--eval_batch=1000",
    ),
    *(
        "--epochs=90",
        "--warmup_epochs=10",
        "--checkpoint_every_epochs=90",
        "--precision=mixed_float16",
    ),
)
_LOOP = (
    *(
        "-m",
        "hybrid_imagenet.benchmarks",
        "loop",
        "--steps={steps}",
        "--rounds={rounds}",
        "--json={folder}/row.json",
        "--",
    ),
    *(
        "--dataset=synthetic",
        "--num_examples=51200",
        "--num_classes=1000",
        "--stall_timeout=0",
        *_STEP[1:],
    ),
)
_TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
_FASTER = "the default if it is 2 % faster"
_LU = "Table 3.2 of Lu et al.: {:,.0f} on a V100"

ARMS = (
    _step(
        "base",
        "the published peer; the host waits if it is not half a step ahead",
        _base,
        alone=True,
    ),
    _step(
        "onednn",
        "on with GPUs if 2 % faster and losses agree",
        _faster(1.02),
        alone=True,
        environment=(("TF_ENABLE_ONEDNN_OPTS", "1"),),
    ),
    _step(
        "stem",
        "the default of --xla_programs if 1 % faster",
        _faster(1.01),
        "--xla_programs=stem",
        alone=True,
    ),
    _step(
        "jit_compile",
        "default if 3 % faster; note its first steps",
        _faster(1.03),
        "--jit_compile",
        alone=True,
    ),
    _step(
        "jit_stem",
        "what one GPU runs by default; the goal is 1.05",
        _faster(1.05),
        *_DEFAULT,
        alone=True,
    ),
    _step(
        "jit_update",
        "the default of --jit_update if 1 % faster",
        _faster(1.01),
        *_DEFAULT,
        "--jit_update",
        than="jit_stem",
        alone=True,
    ),
    _step(
        "shortcut",
        "the default of --xla_programs if 1 % faster than stem",
        _faster(1.01),
        "--xla_programs=stem,shortcut",
        than="stem",
        alone=True,
        environment=(("XLA_FLAGS", "--xla_gpu_enable_cublaslt=true"),),
    ),
    _step(
        "norm",
        "the default of --xla_programs if 1 % faster than stem",
        _faster(1.01),
        "--xla_programs=stem,norm",
        than="stem",
        alone=True,
    ),
    _step(
        "programs",
        "stem, norm and shortcut together",
        _faster(1.01),
        "--xla_programs=stem,norm,shortcut",
        than="stem",
        alone=True,
        environment=(("XLA_FLAGS", "--xla_gpu_enable_cublaslt=true"),),
    ),
    _step("bf16", "docs", _ratio, "--precision=mixed_bfloat16", alone=True),
    _step(
        "bf16_norm",
        "the goal is 0.95 of stem; the default in BF16 if faster than bf16",
        _ratio,
        "--precision=mixed_bfloat16",
        "--xla_programs=stem,norm",
        than="stem",
        alone=True,
    ),
    _step(
        "bf16_jit",
        "the goal is 0.95 of jit_stem",
        _ratio,
        *_DEFAULT,
        "--precision=mixed_bfloat16",
        than="jit_stem",
        alone=True,
    ),
    _step(
        "jit_cache",
        "writes the cache of jit_cached",
        _first_steps,
        *_DEFAULT,
        than="jit_stem",
        alone=True,
        environment=_XLA_CACHE,
    ),
    _step(
        "jit_cached",
        "HYBRID_IMAGENET_XLA_CACHE is set by default if the first steps take half the time",
        _first_steps,
        *_DEFAULT,
        than="jit_cache",
        alone=True,
        environment=_XLA_CACHE,
    ),
    _alone("jax_full"),
    _alone("jax_full_bytes"),
    Arm(
        "gaps",
        ("-m", "hybrid_imagenet.benchmarks", "gaps", "--json={folder}/row.json", "--", *_STEP),
        "what waits, where calls of the step wait",
        _gaps,
        alone=True,
    ),
    _step("again", "smaller differences than this are noise", _ratio),
    _step("512", "docs", _ratio, "--per_gpu_batch=512", gigabytes=48),
    _step("lars", "the planner", _ratio, "--optimizer=lars"),
    _step("muon", "the planner", _ratio, "--optimizer=muon"),
    _step("tf32", "docs", _ratio, "--precision=float32", gigabytes=44),
    _step("1024", "docs", _ratio, "--per_gpu_batch=1024", gigabytes=94),
    _step("sony", "the planner", _ratio, "--augmentation=sony"),
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
        than="ranks2",
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
        than="ranks2",
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
        small=("-k", "sum_like_the_ring and not tensorflow"),
        gigabytes=30,
        timed=False,
        environment=_SHARED,
    ),
    Arm(
        "resume",
        (*_TESTS, "tests/checkpoints/test_exact_resume.py"),
        "two ranks, killed and resumed, end with the same bits",
        _passed,
        small=("-k", "killed_and_resumed"),
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
        "digits_gpu", "within 2 points of the CPU", _same_top1, _DIGITS, _SHORT, than="digits_cpu"
    ),
    _against("torch_compiled"),
    _against("jax"),
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
    "jit_compile",
    "jit_stem",
    "jit_update",
    "jax_full",
    "jax_full_bytes",
    "shortcut",
    "norm",
    "programs",
    "bf16",
    "bf16_norm",
    "bf16_jit",
    "jit_cache",
    "jit_cached",
    "again",
)
"""The arms that `--only=speed` stands for: each form of the step alone and together, and JAX."""
