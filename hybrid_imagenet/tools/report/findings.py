"""Answers what one asks of a run first: did it go well, what held it back, and what to change in
the next.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator
from typing import Any

from hybrid_imagenet.analysis import criteria, published
from hybrid_imagenet.runlog import state
from hybrid_imagenet.runlog.summary import format_accuracy, format_duration, format_epochs
from hybrid_imagenet.schedules import mlperf
from hybrid_imagenet.schedules.relative_step import TOLERATED_FACTOR
from hybrid_imagenet.schedules.training_schedule import FIXED
from hybrid_imagenet.tools.report.load import Run

GOOD, BAD, OPEN = "good", "bad", "open"
_INPUT_BOUND = 0.1  # of the time
_WORSE = 1.1  # times the least validation loss
_ENOUGH = 6  # epochs to speak of a trend
_NOTICED = 0.03  # of the time: less is not called a cause
_AT_MOST = 3  # suggestions
_WORTH, _EVALUATION_WORTH = 0.05, 0.1  # of the time: less is not worth a flag
_EARLY = 0.7  # of the planned epochs: a target reached by then could have been had for less
_UNSTEADY = 0.02  # validation accuracy at the end below the best
_OVERFITTED = 0.05  # training accuracy above validation's
# A training loss above both counts as far above that of guessing. Label smoothing and mixing images
# raise the loss of a network that learns, but not that far.
_MIN_TIMES_GUESSING = 1.5
_MIN_NATS_ABOVE_GUESSING = 1.0


@dataclasses.dataclass(frozen=True)
class Answers:
    """What there is to say first about a run.

    Attributes:
      verdict: `good`, `bad`, or `open` before the end. Without a target that was asked for, a run
        is good that shows no overfitting and did not wait for input.
      outcome: how it went, against its target.
      compared: a run on ImageNet against MLPerf's reference; else empty.
      handover: of a good run, a sentence on updates that grew after the warmup; else empty.
      held_back: of others that sentence first; then what took time besides computation, the largest
        first, as shares of the run's time.
      heading: of `held_back`. A run that reached its target was not held back.
    """

    verdict: str
    outcome: str
    compared: str
    handover: str
    held_back: list[str]
    heading: str


def answers(run: Run) -> Answers:
    """Judges a run from its records."""
    verdict, outcome = _outcome(run)
    compared = _against_reference(run) if run.imagenet else ""
    handover, times = _handover(run), _held_back(run)
    if verdict == GOOD:
        return Answers(verdict, outcome, compared, handover, times, "Where the time went")
    causes = [handover, *times] if handover else times
    return Answers(verdict, outcome, compared, "", causes, "What held it back")


def _outcome(run: Run) -> tuple[str, str]:
    """Returns the verdict and how it went. A run whose loss is far above that of guessing is bad,
    finished or not.
    """
    verdict, text = _against_target(run)
    guessing = None if run.diverged is not None else far_above_guessing(run)
    if guessing is None:
        return verdict, text
    loss, chance = guessing
    return (
        BAD,
        (
            f"{text} The training loss is {loss:.3g}, far above the {chance:.3g} of guessing: it"
            " does not learn."
        ),
    )


def far_above_guessing(run: Run) -> tuple[float, float] | None:
    """Returns the newest training loss and the loss of guessing among the classes, if the first is
    far above.
    """
    classes = (
        run.summary.get("num_classes")
        or run.environment.get("num_classes")
        or run.flags.get("num_classes")
    )
    records = run.epochs or run.steps
    loss = next(
        (r["train_loss"] for r in reversed(records) if r.get("train_loss") is not None), None
    )
    if loss is None or not classes or classes < 2:
        return None
    chance = math.log(classes)
    if run.flags.get("loss") == "sigmoid":
        if ":" in str(run.flags.get("model")):
            return None  # it may begin with any scores, of which this loss is the sum over classes
        chance += 1
    is_far = loss > _MIN_TIMES_GUESSING * chance and loss > chance + _MIN_NATS_ABOVE_GUESSING
    return (loss, chance) if is_far else None


def _against_target(run: Run) -> tuple[str, str]:
    summary = run.summary
    done, planned = summary.get("epochs") or 0, run.epochs_planned
    of = f" of {format_epochs(planned)}" if planned else ""
    if run.diverged is not None:
        loss = run.diverged.get("train_loss")
        told = f"the loss was {loss:.4g}" if loss is not None else "the loss was not finite"
        return (
            BAD,
            (
                f"It diverged at step {run.diverged.get('step')}, after {format_epochs(done)}{of}"
                f" epochs: {told}."
            ),
        )
    best = summary.get("best_val_top1")
    if best is None:
        done_words = (
            f"{format_epochs(done)}{of} epochs" if done else f"{summary.get('steps') or 0} steps"
        )
        return OPEN, f"Nothing has been validated after {done_words}, {run.state}."
    best_epoch = format_epochs(summary.get("best_epoch") or 0)
    best_words = f"the best top-1 is {format_accuracy(best)}, in epoch {best_epoch}"
    ended = "" if done == planned else f" after {format_epochs(done)}{of} epochs"
    ended = ended if run.state == state.FINISHED else f" ({run.state}{ended})"
    goals = _goals(run)
    if not goals:
        signs = [text for text in (overfitting(run), _input_bound(run)) if text]
        verdict = BAD if signs else GOOD if run.state == state.FINISHED else OPEN
        said = signs or ["No overfitting, and input kept up."]
        return verdict, " ".join([f"{best_words[0].upper()}{best_words[1:]}{ended}.", *said])
    missed = [target for target, goal in goals.items() if goal.get("epochs") is None]
    words = [
        f"Target {format_accuracy(target)} top-1 reached in epoch"
        f" {format_epochs(goal['epochs'])}{of}, after {format_duration(goal['seconds'])}"
        for target, goal in goals.items()
        if target not in missed
    ]
    yet = " yet" if run.state == state.RUNNING else ""
    words += [
        f"target {format_accuracy(target)} top-1 not reached{yet},"
        f" {100 * (target - best):.2f} points off"
        for target in missed
    ]
    text = "; ".join([*words, best_words]) + ended + "."
    if not missed:
        return GOOD, text
    lost = summary.get("lost_epochs")
    text += f" Records of {len(lost)} epochs are missing." if lost else ""
    return BAD if run.state == state.FINISHED and not lost else OPEN, text[0].upper() + text[1:]


def _goals(run: Run) -> dict[float, dict[str, Any]]:
    """The top-1 targets that count, each with its entry of the summary; an empty one where there is
    none.
    """
    found = {
        goal["target"]: goal
        for goal in run.summary.get("targets", [])
        if goal["metric"] == "val_top1"
    }
    return {
        target: found.get(target, {}) for target in run.targets if run.target_asked or run.imagenet
    }


def overfitting(run: Run) -> str:
    """Tells whether the validation loss rose in the end while the training loss fell; empty if
    not.
    """
    epochs, losses = run.series("val_loss")
    _, training = run.series("train_loss")
    if len(losses) < _ENOUGH or len(training) != len(losses):
        return ""
    least = min(losses)
    at = losses.index(least)
    if losses[-1] < _WORSE * least or training[-1] >= training[at]:
        return ""
    where = f"was least in epoch {format_epochs(epochs[at])} ({least:.3g})"
    return f"Overfitting: the validation loss {where} and ended at {losses[-1]:.3g}."


def _input_bound(run: Run) -> str:
    share = shares(run)[0].get("input", 0.0)
    return (
        f"Input-bound: {100 * share:.0f} % of the time went into waiting for input."
        if share >= _INPUT_BOUND
        else ""
    )


def _against_reference(run: Run) -> str:
    """A run on ImageNet beside the epochs that MLPerf's reference needs at its batch."""
    batch = global_batch(run)
    epochs = published.reference_epochs(batch)
    if epochs is None:
        return f"MLPerf's reference has no point near batch {batch:,}."
    hit = criteria.first_reaching(run.epochs, "val_top1", mlperf.TARGET)
    own = "has not reached it" if hit is None else f"reached it in epoch {format_epochs(hit.epoch)}"
    return (
        f"MLPerf's reference needs {epochs:.1f} epochs to 75.9 % at batch {batch:,}; this run"
        f" {own}."
    )


def global_batch(run: Run) -> int:
    """Images per update at the start of a run; 0 if its flags do not tell."""
    images, accumulation = (
        run.flags.get("per_gpu_batch") or 0,
        run.flags.get("gradient_accumulation_steps") or 1,
    )
    return int(
        images * accumulation * run.summary["world_size"] * (run.flags.get("virtual_gpus") or 1)
    )


_WORDS = {
    "input": "waiting for input",
    "exposed communication": "communication that computation did not hide",
    "slowest rank": "waiting for the slowest rank",
    "evaluation": "evaluation",
    "checkpoints": "waiting for checkpoints",
}


def jump(run: Run) -> tuple[dict[str, Any], dict[str, Any], float] | None:
    """The records before and after AdaBound's warmup, and how many times larger updates are after
    it.

    The size is the median over layers of |update| / |weights|. None where it does not grow
    `TOLERATED_FACTOR` times, or is not known.
    """
    for before, after in itertools.pairwise(run.epochs):
        if (before.get("phase"), after.get("phase")) != (0, 1):
            continue
        first, second = (
            statistics.median(
                [v for v in (record.get("relative_updates") or {}).values() if v is not None]
                or [0.0]
            )
            for record in (before, after)
        )
        if first > 0 and second >= TOLERATED_FACTOR * first:
            return before, after, second / first
    return None


def _handover(run: Run) -> str:
    """Returns a sentence on updates that grew after AdaBound's warmup, and on the accuracy that
    this cost, if any.
    """
    found = jump(run)
    if found is None:
        return ""
    before, after, times = found
    epoch = format_epochs(after["epoch"])
    line = (
        f"Right after the warmup, in epoch {epoch}, updates grew {times:.2g}-fold relative to the"
        " weights"
    )
    if fell(before, after):
        line += (
            f", and training accuracy fell from {format_accuracy(before['train_top1'])} to"
            f" {format_accuracy(after['train_top1'])}"
        )
    return f"{line}."


def fell(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether training accuracy is known in both records and lower in the second."""
    old, new = before.get("train_top1"), after.get("train_top1")
    return old is not None and new is not None and new < old


def _held_back(run: Run) -> list[str]:
    causes, whole = shares(run)
    if not whole:
        return ["No times are known before the first epoch has ended."]
    lines = []
    for cause, share in sorted(causes.items(), key=lambda pair: -pair[1]):
        if share >= _NOTICED:
            who = f" ({slowest(run)})" if cause == "slowest rank" and slowest(run) else ""
            seconds = format_duration(share * whole)
            lines.append(
                f"{100 * share:.0f} % of the time ({seconds}): {_WORDS.get(cause, cause)}{who}"
            )
    if not lines:
        lines.append(f"Nothing that was measured took {100 * _NOTICED:.0f} % of the time or more.")
    if run.summary["world_size"] > 1 and "exposed communication" not in causes:
        lines.append("Communication was not measured.")
    return lines


def shares(run: Run) -> tuple[dict[str, float], float]:
    """The part of the run's time that each cause took, and the time; start and compilation are one
    of the causes.
    """
    parts = run.summary.get("time_by_cause") or {}
    whole = run.summary.get("wall_seconds") or 0.0
    if whole <= 0 or not parts:
        return {}, 0.0
    causes = {name: parts[name] / whole for name in _WORDS if name in parts}
    trained = [r["train_seconds"] for r in run.epochs if r.get("train_seconds")]
    if len(trained) > 2:  # the first epoch holds what compilation takes
        more = trained[0] - statistics.median(trained[1:])
        causes["the first epoch beyond the others (compilation)"] = max(more, 0.0) / whole
    return causes, whole


def slowest(run: Run) -> str:
    """The rank that the others waited for in most epochs, with its host."""
    ranks = [int(r["slowest_rank"]) for r in run.epochs if r.get("slowest_rank") is not None]
    if not ranks:
        return ""
    rank, times = collections.Counter(ranks).most_common(1)[0]
    hosts = run.environment.get("hosts") or []
    host = f" on {hosts[rank]}" if rank < len(hosts) and len(set(hosts)) > 1 else ""
    return f"rank {rank}{host} in {times} of {len(ranks)} epochs"


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
    if run.diverged is None and far_above_guessing(run):
        return  # the speed of a run that does not learn is of no use
    causes, _ = shares(run)
    for cause, share in sorted(causes.items(), key=lambda pair: -pair[1]):
        yield from _about_time(run, cause, share)
    if run.on_gpus and run.environment.get("precision") == "float32":
        why = (
            "it computed in FP32 on GPUs; FP16 is faster, and changes the optimization slightly by"
            " its rounding"
        )
        yield Suggestion("--precision=mixed_float16", why)
    if run.state == state.FINISHED:
        seed = int(run.flags.get("seed") or 0) + 1
        yield Suggestion(
            f"--seed={seed}",
            "one run does not tell how far results scatter; repeat it before comparing",
        )


def _about_training(run: Run) -> Iterator[Suggestion]:
    flags = run.flags
    epochs = float(run.epochs_planned or 0)
    published = flags.get("lr_schedule") in FIXED
    guessing = far_above_guessing(run)
    if run.diverged is not None or guessing is not None:
        why = "a third of the step"
        if guessing is not None:
            why = (
                f"the training loss of {guessing[0]:.3g} is far above the {guessing[1]:.3g} of"
                f" guessing; {why}"
            )
        rate = "lars_eta" if published else "lr"
        if flags.get("lr_schedule") != "mlperf" and flags.get(rate):
            third = float(f"{flags[rate] / 3:.2g}")
            yield Suggestion(f"--{rate}={third:g}", why)
        warmup = 2 * float(flags.get("warmup_epochs") or 0) or 5.0
        if warmup < epochs and not published:
            yield Suggestion(
                f"--warmup_epochs={warmup:g}",
                "a longer warmup raises the learning rate more slowly",
            )
        return
    if (found := jump(run)) and fell(*found[:2]) and not flags.get("hybrid_ramp_epochs"):
        yield Suggestion(
            "--hybrid_ramp_epochs=2",
            "accuracy fell where LARS took over; this lets it come in slowly",
        )
    goals = _goals(run)
    reached: list[Any] = [goal.get("epochs") for goal in goals.values()]
    if run.state != state.FINISHED or not epochs:
        return
    if not goals or None in reached:
        yield from _missed(run, epochs)
    elif max(reached) <= _EARLY * epochs and not flags.get("stop_at_top1"):
        why = (
            f"the target came in epoch {format_epochs(max(reached))} of"
            f" {format_epochs(epochs)}; the run then ends there"
        )
        yield Suggestion(f"--stop_at_top1={max(goals):g}", why)


def _missed(run: Run, epochs: float) -> Iterator[Suggestion]:
    """For a finished run under its target."""
    flags, summary, published = run.flags, run.summary, run.flags.get("lr_schedule") in FIXED
    train, validation = summary.get("train_top1"), summary.get("val_top1")
    done, (validated, _) = summary.get("epochs") or 0, run.series("val_top1")
    if done < epochs:
        flag = next((name for name in ("max_steps", "stop_at_top1") if flags.get(name)), None)
        if flag:
            yield Suggestion(
                f"without --{flag}",
                f"training ended after {format_epochs(done)} of {format_epochs(epochs)} epochs",
            )
    elif summary.get("best_epoch") == done and len(validated) > 1:
        yield Suggestion(
            f"--epochs={format_epochs(1.5 * epochs)}",
            "validation was still rising in the last epoch",
        )
    if train is not None and validation is not None and train - validation > _OVERFITTED:
        gap = f"training accuracy is {100 * (train - validation):.1f} points above validation's"
        if not flags.get("label_smoothing"):
            yield Suggestion("--label_smoothing=0.1", gap)
        if flags.get("batch_norm") == "last":
            yield Suggestion(
                "--batch_norm=precise", f"{gap}; statistics of one small batch may be the cause"
            )
    elif (
        train is not None
        and run.target_asked
        and train < max(run.targets, default=0.0)
        and flags.get("lr")
        and not published
    ):
        best = summary.get("best_val_top1")
        if validation is not None and best is not None and best - validation > _UNSTEADY:
            # A higher rate would make it less steady.
            when = format_epochs(summary.get("best_epoch") or 0)
            fall = (
                f"fell from {format_accuracy(best)} in epoch {when} to"
                f" {format_accuracy(validation)} at the end"
            )
            yield Suggestion(
                f"--lr={flags['lr'] / 2:g}", f"validation accuracy {fall}: a lower rate is steadier"
            )
            return
        why = (
            f"the training images themselves are at {format_accuracy(train)}: a higher learning"
            " rate, or more epochs"
        )
        yield Suggestion(f"--lr={2 * flags['lr']:g}", why)


def _about_time(run: Run, cause: str, share: float) -> Iterator[Suggestion]:
    flags, part = run.flags, f"{100 * share:.0f} % of the time"
    if cause == "input" and share >= _WORTH:
        waits = f"{part} went into waiting for input"
        if flags.get("data_cache") == "none" and flags.get("dataset") not in (
            "digits",
            "synthetic_tensors",
        ):
            yield Suggestion(
                "--data_cache=encoded", f"{waits}; reads each image once, if memory holds them"
            )
        if run.on_gpus and flags.get("decoder") == "tensorflow":
            yield Suggestion("--decoder=dali", f"{waits}; decodes on the GPU")
    elif cause == "exposed communication" and share >= _WORTH:
        if flags.get("compression") == "none":
            yield Suggestion(
                "--compression=fp16",
                f"{part} went into communication; halves the bytes sent, and rounds gradients to"
                " FP16",
            )
        if run.summary["world_size"] > 2:
            ranks = (
                f"hybrid-imagenet run -np {run.summary['world_size']}"
                " --module=hybrid_imagenet.benchmarks"
            )
            yield Suggestion(
                f"{ranks} -- allreduce", f"{part} went into communication; compares algorithms"
            )
        accumulation = int(flags.get("gradient_accumulation_steps") or 1)
        why = (
            f"{part} went into communication; half as many exchanges. This changes the"
            " optimization: the batch is twice as large, which needs another learning rate"
        )
        yield Suggestion(f"--gradient_accumulation_steps={2 * accumulation}", why)
    elif cause == "slowest rank" and share >= _WORTH:
        who = slowest(run) or "a rank"
        several = len(set(run.environment.get("hosts") or [])) > 1
        command = "hybrid-imagenet doctor" + (" -H HOSTS" if several else "")
        yield Suggestion(
            command, f"{part} went into waiting for {who}: look for other work on its cores"
        )
    elif cause == "evaluation" and share >= _EVALUATION_WORTH:
        every = float(flags.get("eval_every_epochs") or 1)
        yield Suggestion(f"--eval_every_epochs={2 * every:g}", f"{part} went into evaluation")
    elif cause == "checkpoints" and share >= _WORTH:
        every = float(flags.get("checkpoint_every_epochs") or 1)
        yield Suggestion(
            f"--checkpoint_every_epochs={2 * every:g}", f"{part} went into waiting for checkpoints"
        )
