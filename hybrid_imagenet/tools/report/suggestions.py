"""Suggests what to change in the next run: flags, with why."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from hybrid_imagenet.runlog import state
from hybrid_imagenet.tools.report.findings import fell, jump, percent, shares, slowest
from hybrid_imagenet.tools.report.load import Run

_AT_MOST = 3
_WORTH = 0.05  # of the time: less is not worth a flag
_EVALUATION_WORTH = 0.1
_EARLY = 0.7  # of the planned epochs: a target reached by then could have been had for less
_OVERFITTED = 0.05  # training accuracy above validation's


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """What to change: a flag, or a command, and why."""

    change: str
    why: str


def suggestions(run: Run) -> list[Suggestion]:
    """At most three changes, the most important first."""
    return list(itertools.islice(_all(run), _AT_MOST))


def _all(run: Run) -> Iterator[Suggestion]:
    yield from _about_training(run)
    causes, _ = shares(run)
    for cause, share in sorted(causes.items(), key=lambda pair: -pair[1]):
        yield from _about_time(run, cause, share)
    if run.on_gpus and run.environment.get("precision") == "float32":
        yield Suggestion("--precision=mixed_float16", "it computed in FP32 on GPUs")
    if run.state == state.FINISHED:
        seed = int(run.flags.get("seed") or 0) + 1
        yield Suggestion(f"--seed={seed}", "one run does not tell how far results scatter; repeat it before comparing")


def _about_training(run: Run) -> Iterator[Suggestion]:
    flags, summary = run.flags, run.summary
    epochs = float(run.epochs_planned or 0)
    if run.diverged is not None:
        if flags.get("lr_schedule") not in ("sony_a", "sony_b", "mlperf") and flags.get("lr"):
            third = float(f"{flags['lr'] / 3:.2g}")
            yield Suggestion(f"--lr={third:g}", "a third of the learning rate")
        warmup = 2 * float(flags.get("warmup_epochs") or 0) or 5.0
        if warmup < epochs:
            yield Suggestion(f"--warmup_epochs={warmup:g}", "a longer warmup raises the learning rate more slowly")
        return
    if (found := jump(run)) and fell(*found[:2]) and not flags.get("hybrid_ramp_epochs"):
        yield Suggestion("--hybrid_ramp_epochs=2", "accuracy fell where LARS took over; this lets it come in slowly")
    asked = run.targets if run.target_asked or run.imagenet else []
    goals = {goal["target"]: goal for goal in summary.get("targets", []) if goal["metric"] == "val_top1"}
    reached = [goals.get(target, {}).get("epochs") for target in asked]
    if run.state != state.FINISHED or not epochs:
        return
    if not asked or None in reached:
        yield from _missed(run, epochs)
    elif max(reached) <= _EARLY * epochs and not flags.get("stop_at_top1"):
        why = f"the target came in epoch {max(reached):g} of {epochs:g}; the run then ends there"
        yield Suggestion(f"--stop_at_top1={max(asked):g}", why)


def _missed(run: Run, epochs: float) -> Iterator[Suggestion]:
    """For a finished run under its target."""
    flags, summary = run.flags, run.summary
    train, validation = summary.get("train_top1"), summary.get("val_top1")
    if summary.get("best_epoch") == summary.get("epochs"):
        yield Suggestion(f"--epochs={1.5 * epochs:g}", "validation was still rising in the last epoch")
    if train is not None and validation is not None and train - validation > _OVERFITTED:
        gap = f"training accuracy is {100 * (train - validation):.1f} points above validation's"
        if not flags.get("label_smoothing"):
            yield Suggestion("--label_smoothing=0.1", gap)
        if not flags.get("mixup"):
            yield Suggestion("--mixup=0.2", gap)
        if flags.get("batch_norm") == "last":
            yield Suggestion("--batch_norm=precise", f"{gap}; statistics of one small batch may be the cause")
    elif train is not None and run.target_asked and train < max(run.targets) and flags.get("lr"):
        why = f"the training images themselves are at {percent(train)}: a higher learning rate, or more epochs"
        yield Suggestion(f"--lr={2 * flags['lr']:g}", why)


def _about_time(run: Run, cause: str, share: float) -> Iterator[Suggestion]:
    flags, part = run.flags, f"{100 * share:.0f} % of the time"
    if cause == "input" and share >= _WORTH:
        if flags.get("data_cache") == "none" and flags.get("dataset") not in ("digits", "synthetic_tensors"):
            yield Suggestion("--data_cache=encoded", f"{part} went into waiting for input; reads each image once")
        if run.on_gpus and flags.get("decoder") == "tensorflow":
            yield Suggestion("--decoder=dali", f"{part} went into waiting for input; decodes on the GPU")
    elif cause == "exposed communication" and share >= _WORTH:
        if flags.get("compression") == "none":
            yield Suggestion("--compression=fp16", f"{part} went into communication; halves the bytes sent")
        accumulation = int(flags.get("gradient_accumulation_steps") or 1)
        why = f"{part} went into communication; half as many exchanges, at twice the batch"
        yield Suggestion(f"--gradient_accumulation_steps={2 * accumulation}", why)
    elif cause == "slowest rank" and share >= _WORTH:
        who = slowest(run) or "a rank"
        several = len(set(run.environment.get("hosts") or [])) > 1
        command = "hybrid-imagenet doctor" + (" -H HOSTS" if several else "")
        yield Suggestion(command, f"{part} went into waiting for {who}: look for other work on its cores")
    elif cause == "evaluation" and share >= _EVALUATION_WORTH:
        every = float(flags.get("eval_every_epochs") or 1)
        yield Suggestion(f"--eval_every_epochs={2 * every:g}", f"{part} went into evaluation")
    elif cause == "checkpoints" and share >= _WORTH:
        every = float(flags.get("checkpoint_every_epochs") or 1)
        yield Suggestion(f"--checkpoint_every_epochs={2 * every:g}", f"{part} went into waiting for checkpoints")
