"""Assesses a run: did it go well, what took time, and what to try next.

Every text here is one that the report shows.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from hybrid_imagenet.analysis import criteria, published
from hybrid_imagenet.commands.report.load import LoadedRun
from hybrid_imagenet.runlog import state
from hybrid_imagenet.runlog.summary import format_accuracy, format_duration, format_epochs
from hybrid_imagenet.schedules import mlperf
from hybrid_imagenet.schedules.relative_step import TOLERATED_FACTOR
from hybrid_imagenet.schedules.training_schedule import FIXED_SCHEDULES

GOOD = "good"
BAD = "bad"
OPEN = "open"

# A run is called input-bound if it waited for input for this fraction of its time.
_INPUT_BOUND_FRACTION = 0.1
# A run is called overfitted if its validation loss ended at this multiple of its minimum.
_OVERFITTING_LOSS_RATIO = 1.1
# Fewer epochs do not show a trend.
_MIN_EPOCHS_OF_TREND = 6
# Causes that took a smaller fraction of the time are not named.
_MIN_NAMED_FRACTION = 0.03
# Causes that took a smaller fraction of the time do not justify another flag. Validating less often
# has a price, so evaluation has to cost more.
_MIN_FRACTION_FOR_ADVICE = 0.05
_MIN_EVALUATION_FRACTION_FOR_ADVICE = 0.1
_MAX_SUGGESTIONS = 3
# If a target is reached within this fraction of the epochs, the run could have stopped there.
_EARLY_FRACTION = 0.7
# If validation accuracy ends this far below its maximum, training was unsteady.
_UNSTEADY_ACCURACY_DROP = 0.02
# If training accuracy is this far above validation accuracy, the network has overfitted.
_OVERFITTING_ACCURACY_GAP = 0.05
# A training loss above both counts as far above that of guessing. Label smoothing and mixing images
# raise the loss of a network that learns, but not that far.
_MIN_TIMES_GUESSING = 1.5
_MIN_NATS_ABOVE_GUESSING = 1.0

_CAUSE_TEXTS = {
    "input": "waiting for input",
    "exposed communication": "communication that computation did not hide",
    "slowest rank": "waiting for the slowest rank",
    "evaluation": "evaluation",
    "checkpoints": "waiting for checkpoints",
}
_COMPILATION = "the first epoch beyond the others (compilation)"


@dataclasses.dataclass(frozen=True)
class Assessment:
    """The judgment of a run.

    Attributes:
      verdict: `good`, `bad`, or `open` if the run has not ended. Without a target that was
        requested, a run is good if it does not overfit and did not wait for input.
      outcome: How the run went, compared with its target.
      reference_comparison: The run compared with MLPerf's reference; empty if it did not train on
        ImageNet.
      handover_note: For a good run, a sentence on updates that grew after the warmup; else empty.
      causes: What held the run back or took time. First the sentence on updates that grew, unless
        the run is good; then the causes of time other than computation, the largest first.
      causes_heading: Heading of `causes`. A run that reached its target was not held back.
    """

    verdict: str
    outcome: str
    reference_comparison: str
    handover_note: str
    causes: list[str]
    causes_heading: str


def assess(run: LoadedRun) -> Assessment:
    """Assesses a run from its records."""
    verdict, outcome = _assess_outcome(run)
    reference_comparison = _compare_with_reference(run) if run.is_imagenet else ""
    handover_note = _describe_update_jump(run)
    time_causes = _describe_time_causes(run)
    if verdict == GOOD:
        return Assessment(
            verdict,
            outcome,
            reference_comparison,
            handover_note,
            time_causes,
            causes_heading="Where the time went",
        )
    if handover_note:
        time_causes = [handover_note, *time_causes]
    return Assessment(
        verdict,
        outcome,
        reference_comparison,
        handover_note="",
        causes=time_causes,
        causes_heading="What held it back",
    )


def _assess_outcome(run: LoadedRun) -> tuple[str, str]:
    """Returns the verdict and a description of the outcome.

    A run whose loss is far above that of guessing is bad, whether it has ended or not.
    """
    if run.divergence_record is not None:
        return BAD, _describe_divergence(run, run.divergence_record)
    verdict, text = _assess_accuracy(run)
    if run.error:
        text += f" The error that ended it: {run.error}"
    losses = loss_far_above_guessing(run)
    if losses is None:
        return verdict, text
    loss, guessing_loss = losses
    text += (
        f" The training loss is {loss:.3g}, far above the {guessing_loss:.3g} of guessing: it does"
        " not learn."
    )
    return BAD, text


def _describe_divergence(run: LoadedRun, record: Mapping[str, Any]) -> str:
    loss = record.get("train_loss")
    loss_text = "the loss was not finite" if loss is None else f"the loss was {loss:.4g}"
    return f"It diverged at step {record.get('step')}, after {_progress(run)} epochs: {loss_text}."


def _progress(run: LoadedRun) -> str:
    """Returns the epochs of a run as `5 of 12`; as `5` if the plan is unknown."""
    epochs = format_epochs(run.summary.get("epochs") or 0)
    if not run.epochs_planned:
        return epochs
    return f"{epochs} of {format_epochs(run.epochs_planned)}"


def loss_far_above_guessing(run: LoadedRun) -> tuple[float, float] | None:
    """Returns training loss and guessing loss if the first is far above.

    None if the newest training loss is lower, or if either is unknown.
    """
    classes = (
        run.summary.get("num_classes")
        or run.environment.get("num_classes")
        or run.flags.get("num_classes")
    )
    loss = _newest_training_loss(run)
    if loss is None or not classes or classes < 2:
        return None
    guessing_loss = math.log(classes)
    if run.flags.get("loss") == "sigmoid":
        if ":" in str(run.flags.get("model")):
            # The sigmoid loss is a sum over classes, and a network of the user's may begin with any
            # scores.
            return None
        guessing_loss += 1
    is_far_above = (
        loss > _MIN_TIMES_GUESSING * guessing_loss
        and loss > guessing_loss + _MIN_NATS_ABOVE_GUESSING
    )
    return (loss, guessing_loss) if is_far_above else None


def _newest_training_loss(run: LoadedRun) -> float | None:
    for record in reversed(run.epochs or run.steps):
        loss: float | None = record.get("train_loss")
        if loss is not None:
            return loss
    return None


def _assess_accuracy(run: LoadedRun) -> tuple[str, str]:
    """Returns the verdict, and the accuracy compared with the targets."""
    best = run.summary.get("best_val_top1")
    if best is None:
        if run.summary.get("epochs"):
            progress = f"{_progress(run)} epochs"
        else:
            progress = f"{run.summary.get('steps') or 0} steps"
        return OPEN, f"Nothing has been validated after {progress}, {run.state}."
    targets = _meaningful_targets(run)
    if not targets:
        return _assess_without_target(run, best)
    return _assess_targets(run, best, targets)


def _meaningful_targets(run: LoadedRun) -> dict[float, dict[str, Any]]:
    """Returns the top-1 targets of a run, each with its entry of the summary.

    The entry is empty if the summary has none for the target. There are no targets if they are the
    defaults on another dataset than ImageNet, for which they mean nothing.
    """
    if not run.has_meaningful_targets:
        return {}
    entries = {
        entry["target"]: entry
        for entry in run.summary.get("targets", [])
        if entry["metric"] == "val_top1"
    }
    return {target: entries.get(target, {}) for target in run.targets}


def _assess_without_target(run: LoadedRun, best: float) -> tuple[str, str]:
    problems = [text for text in (describe_overfitting(run), _describe_input_bound(run)) if text]
    sentences = [f"{_capitalize(_best_text(run, best))}{_ending(run)}."]
    if problems:
        sentences += problems
        verdict = BAD
    else:
        sentences.append("No overfitting, and input kept up.")
        verdict = GOOD if run.state == state.FINISHED else OPEN
    return verdict, " ".join(sentences)


def _assess_targets(
    run: LoadedRun, best: float, targets: Mapping[float, Mapping[str, Any]]
) -> tuple[str, str]:
    planned = f" of {format_epochs(run.epochs_planned)}" if run.epochs_planned else ""
    not_reached = "not reached yet" if run.state == state.RUNNING else "not reached"
    reached_texts = []
    missed_texts = []
    for target, entry in targets.items():
        name = f"target {format_accuracy(target)} top-1"
        if entry.get("epochs") is None:
            points = 100 * (target - best)
            missed_texts.append(f"{name} {not_reached}, {points:.2f} points off")
        else:
            epoch = format_epochs(entry["epochs"])
            time = format_duration(entry["seconds"])
            reached_texts.append(f"{name} reached in epoch {epoch}{planned}, after {time}")
    clauses = [*reached_texts, *missed_texts, _best_text(run, best)]
    text = _capitalize("; ".join(clauses)) + f"{_ending(run)}."
    if not missed_texts:
        return GOOD, text
    lost_epochs = run.summary.get("lost_epochs")
    if lost_epochs:
        text += f" Records of {len(lost_epochs)} epochs are missing."
    # The target may have been reached in an epoch without a record.
    is_certain = run.state == state.FINISHED and not lost_epochs
    return BAD if is_certain else OPEN, text


def _best_text(run: LoadedRun, best: float) -> str:
    epoch = format_epochs(run.summary.get("best_epoch") or 0)
    return f"the best top-1 is {format_accuracy(best)}, in epoch {epoch}"


def _ending(run: LoadedRun) -> str:
    """Returns how the run ended; empty if it finished all epochs."""
    ended_early = (run.summary.get("epochs") or 0) != run.epochs_planned
    epochs = f" after {_progress(run)} epochs" if ended_early else ""
    if run.state == state.FINISHED:
        return epochs
    return f" ({run.state}{epochs})"


def _capitalize(text: str) -> str:
    return text[0].upper() + text[1:]


def describe_overfitting(run: LoadedRun) -> str:
    """Describes a validation loss that rose while the training loss fell.

    Empty if there is none.
    """
    epochs, validation_losses = run.series("val_loss")
    _, training_losses = run.series("train_loss")
    if len(validation_losses) < _MIN_EPOCHS_OF_TREND:
        return ""
    if len(training_losses) != len(validation_losses):
        return ""
    lowest = min(validation_losses)
    lowest_at = validation_losses.index(lowest)
    last = validation_losses[-1]
    if last < _OVERFITTING_LOSS_RATIO * lowest:
        return ""
    if training_losses[-1] >= training_losses[lowest_at]:
        return ""
    return (
        f"Overfitting: the validation loss was lowest in epoch {format_epochs(epochs[lowest_at])}"
        f" ({lowest:.3g}) and ended at {last:.3g}."
    )


def _describe_input_bound(run: LoadedRun) -> str:
    """Describes a run that waited for input for much of its time; else empty."""
    fractions, _ = time_fractions(run)
    fraction = fractions.get("input", 0.0)
    if fraction < _INPUT_BOUND_FRACTION:
        return ""
    return f"Input-bound: {_format_share(fraction)} went into waiting for input."


def _compare_with_reference(run: LoadedRun) -> str:
    """Compares the epochs to 75.9 % with MLPerf's reference at the same batch."""
    batch = global_batch(run)
    reference_epochs = published.reference_epochs(batch)
    if reference_epochs is None:
        return f"MLPerf's reference has no point near batch {batch:,}."
    hit = criteria.first_reaching(run.epochs, "val_top1", mlperf.TARGET_TOP1)
    result = "has not reached it"
    if hit is not None:
        result = f"reached it in epoch {format_epochs(hit.epoch)}"
    return (
        f"MLPerf's reference needs {reference_epochs:.1f} epochs to"
        f" {format_accuracy(mlperf.TARGET_TOP1)} at batch {batch:,}; this run {result}."
    )


def global_batch(run: LoadedRun) -> int:
    """Returns the images per update at the start of a run; 0 if its flags do not say."""
    per_gpu_batch = run.flags.get("per_gpu_batch") or 0
    accumulation_steps = run.flags.get("gradient_accumulation_steps") or 1
    virtual_gpus = run.flags.get("virtual_gpus") or 1
    return int(per_gpu_batch * accumulation_steps * run.summary["world_size"] * virtual_gpus)


@dataclasses.dataclass(frozen=True)
class UpdateJump:
    """Updates that grew when SGD took over from AdaBound at the end of the warmup.

    Attributes:
      before: Record of the last epoch of AdaBound.
      after: Record of the first epoch of SGD.
      factor: How much larger |update| / |weights| is after the warmup, as the median over layers.
    """

    before: Mapping[str, Any]
    after: Mapping[str, Any]
    factor: float

    @property
    def lowered_accuracy(self) -> bool:
        """Whether training accuracy fell; False if it is not known in both epochs."""
        before = self.before.get("train_top1")
        after = self.after.get("train_top1")
        if before is None or after is None:
            return False
        return bool(after < before)


def find_update_jump(run: LoadedRun) -> UpdateJump | None:
    """Returns how much updates grew after AdaBound's warmup.

    None if they grew less than `TOLERATED_FACTOR` times, or if their sizes were not recorded.
    """
    for before, after in itertools.pairwise(run.epochs):
        is_handover = before.get("phase") == 0 and after.get("phase") == 1
        if not is_handover:
            continue
        size_before = _median_relative_update(before)
        size_after = _median_relative_update(after)
        if size_before > 0 and size_after >= TOLERATED_FACTOR * size_before:
            return UpdateJump(before, after, size_after / size_before)
    return None


def _median_relative_update(record: Mapping[str, Any]) -> float:
    """Returns the median over layers of |update| / |weights|; 0 if unknown."""
    by_layer = record.get("relative_updates") or {}
    sizes = [size for size in by_layer.values() if size is not None]
    return statistics.median(sizes) if sizes else 0.0


def _describe_update_jump(run: LoadedRun) -> str:
    """Describes updates that grew after AdaBound's warmup; else empty."""
    jump = find_update_jump(run)
    if jump is None:
        return ""
    text = (
        f"Right after the warmup, in epoch {format_epochs(jump.after['epoch'])}, updates grew"
        f" {jump.factor:.2g}-fold relative to the weights"
    )
    if jump.lowered_accuracy:
        before = format_accuracy(jump.before["train_top1"])
        after = format_accuracy(jump.after["train_top1"])
        text += f", and training accuracy fell from {before} to {after}"
    return f"{text}."


def _describe_time_causes(run: LoadedRun) -> list[str]:
    """Returns a line for each cause that took much of the time, the largest first."""
    fractions, total_seconds = time_fractions(run)
    if not total_seconds:
        return ["No times are known before the end of the first epoch."]
    lines = []
    for cause, fraction in _largest_first(fractions):
        if fraction < _MIN_NAMED_FRACTION:
            continue
        time = format_duration(fraction * total_seconds)
        line = f"{_format_share(fraction)} ({time}): {_CAUSE_TEXTS.get(cause, cause)}"
        rank = describe_slowest_rank(run) if cause == "slowest rank" else ""
        if rank:
            line += f" ({rank})"
        lines.append(line)
    if not lines:
        lines.append(
            f"Nothing that was measured took {_format_share(_MIN_NAMED_FRACTION)} or more."
        )
    if run.summary["world_size"] > 1 and "exposed communication" not in fractions:
        lines.append("Communication was not measured.")
    return lines


def _format_share(fraction: float) -> str:
    """Returns a share of the time in percent, such as "12 % of the time"."""
    return f"{100 * fraction:.0f} % of the time"


def _largest_first(fractions: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(fractions.items(), key=lambda item: -item[1])


def time_fractions(run: LoadedRun) -> tuple[dict[str, float], float]:
    """Returns the fraction of the run's time by cause, and the run's time in seconds.

    Computation is not among the causes. Both results are empty if the times are unknown.
    """
    seconds_by_cause = run.summary.get("time_by_cause") or {}
    total_seconds = run.summary.get("wall_seconds") or 0.0
    if total_seconds <= 0 or not seconds_by_cause:
        return {}, 0.0
    fractions = {
        cause: seconds_by_cause[cause] / total_seconds
        for cause in _CAUSE_TEXTS
        if cause in seconds_by_cause
    }
    epoch_seconds = [
        record["train_seconds"] for record in run.epochs if record.get("train_seconds")
    ]
    # Only the first epoch includes start and compilation. Two others are needed to compare with.
    if len(epoch_seconds) > 2:
        extra_seconds = epoch_seconds[0] - statistics.median(epoch_seconds[1:])
        fractions[_COMPILATION] = max(extra_seconds, 0.0) / total_seconds
    return fractions, total_seconds


def describe_slowest_rank(run: LoadedRun) -> str:
    """Describes the rank that was the slowest in most epochs; empty if unknown."""
    ranks = [
        int(record["slowest_rank"])
        for record in run.epochs
        if record.get("slowest_rank") is not None
    ]
    if not ranks:
        return ""
    rank, times = collections.Counter(ranks).most_common(1)[0]
    hosts = run.environment.get("hosts") or []
    has_several_hosts = len(set(hosts)) > 1
    host = f" on {hosts[rank]}" if rank < len(hosts) and has_several_hosts else ""
    return f"rank {rank}{host} in {times} of {len(ranks)} epochs"


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A change to try in the next run.

    Attributes:
      change: A flag with its value, or a command.
      reason: Why it may help.
    """

    change: str
    reason: str


def suggestions(run: LoadedRun) -> list[Suggestion]:
    """Returns at most three changes to try, the most important first."""
    return list(itertools.islice(_all_suggestions(run), _MAX_SUGGESTIONS))


def _all_suggestions(run: LoadedRun) -> Iterator[Suggestion]:
    diverged = run.divergence_record is not None
    does_not_learn = loss_far_above_guessing(run) is not None
    if diverged or does_not_learn:
        yield from _suggest_smaller_steps(run)
    else:
        yield from _suggest_for_accuracy(run)
    if does_not_learn and not diverged:
        # The speed of a run that does not learn does not matter.
        return
    fractions, _ = time_fractions(run)
    for cause, fraction in _largest_first(fractions):
        yield from _suggest_for_time(run, cause, fraction)
    if run.has_gpus and run.environment.get("precision") == "float32":
        yield Suggestion(
            "--precision=mixed_float16",
            "it computed in FP32 on GPUs; FP16 is faster, and changes the optimization slightly by"
            " its rounding",
        )
    if run.state == state.FINISHED:
        seed = int(run.flags.get("seed") or 0) + 1
        yield Suggestion(
            f"--seed={seed}",
            "one run does not show how much results vary; repeat it before you compare",
        )


def _suggest_smaller_steps(run: LoadedRun) -> Iterator[Suggestion]:
    """Suggests changes for a run that diverged or does not learn."""
    flags = run.flags
    reason = "a third of the step"
    losses = loss_far_above_guessing(run)
    if losses is not None:
        loss, guessing_loss = losses
        reason = (
            f"the training loss of {loss:.3g} is far above the {guessing_loss:.3g} of guessing;"
            f" {reason}"
        )
    # A published schedule fixes the learning rate, so there the coefficient of LARS has to change.
    has_fixed_schedule = flags.get("lr_schedule") in FIXED_SCHEDULES
    flag = "lars_eta" if has_fixed_schedule else "lr"
    if flags.get("lr_schedule") != "mlperf" and flags.get(flag):
        # Two significant digits are precise enough for a first try.
        third = float(f"{flags[flag] / 3:.2g}")
        yield Suggestion(f"--{flag}={third:g}", reason)
    warmup_epochs = 2 * float(flags.get("warmup_epochs") or 0) or 5.0
    if warmup_epochs < float(run.epochs_planned or 0) and not has_fixed_schedule:
        yield Suggestion(
            f"--warmup_epochs={warmup_epochs:g}",
            "a longer warmup raises the learning rate more slowly",
        )


def _suggest_for_accuracy(run: LoadedRun) -> Iterator[Suggestion]:
    """Suggests changes for a run that learns."""
    jump = find_update_jump(run)
    if jump is not None and jump.lowered_accuracy and not run.flags.get("hybrid_ramp_epochs"):
        yield Suggestion(
            "--hybrid_ramp_epochs=2",
            "accuracy fell when LARS took over; this phases it in over two epochs",
        )
    epochs = float(run.epochs_planned or 0)
    if run.state != state.FINISHED or not epochs:
        return
    targets = _meaningful_targets(run)
    epochs_to_targets = [entry.get("epochs") for entry in targets.values()]
    reached = [reached_epoch for reached_epoch in epochs_to_targets if reached_epoch is not None]
    if not targets or len(reached) < len(targets):
        yield from _suggest_for_missed_target(run, epochs)
    elif max(reached) <= _EARLY_FRACTION * epochs and not run.flags.get("stop_at_top1"):
        yield Suggestion(
            f"--stop_at_top1={max(targets):g}",
            f"the target was reached in epoch {format_epochs(max(reached))} of"
            f" {format_epochs(epochs)}; this ends the run there",
        )


def _suggest_for_missed_target(run: LoadedRun, epochs: float) -> Iterator[Suggestion]:
    """Suggests changes for a finished run that has no target or did not reach it.

    Args:
      run: The run.
      epochs: Its planned number of epochs.
    """
    warmup_epochs = float(run.flags.get("warmup_epochs") or 0)
    if 0 < epochs <= warmup_epochs:
        # Nothing can be said about --lr, which acts after the warmup.
        yield Suggestion(
            f"--epochs={format_epochs(2 * warmup_epochs)}",
            f"all epochs belong to the warmup, which has {format_epochs(warmup_epochs)}",
        )
        return
    yield from _suggest_more_epochs(run, epochs)
    training = run.summary.get("train_top1")
    is_mixed = bool(run.flags.get("mixup_alpha") or run.flags.get("cutmix_alpha"))
    # Accuracy on mixed images is low however well the network fits the images themselves.
    if training is None or is_mixed:
        return
    validation = run.summary.get("val_top1")
    if validation is not None and training - validation > _OVERFITTING_ACCURACY_GAP:
        yield from _suggest_regularization(run, training - validation)
    elif run.target_requested and training < max(run.targets, default=0.0):
        yield from _suggest_learning_rate(run, training, validation)


def _suggest_more_epochs(run: LoadedRun, epochs: float) -> Iterator[Suggestion]:
    trained_epochs = run.summary.get("epochs") or 0
    if trained_epochs < epochs:
        for flag in ("max_steps", "stop_at_top1"):
            if run.flags.get(flag):
                yield Suggestion(
                    f"without --{flag}",
                    f"training ended after {format_epochs(trained_epochs)} of"
                    f" {format_epochs(epochs)} epochs",
                )
                return
        return
    validated_epochs, _ = run.series("val_top1")
    if run.summary.get("best_epoch") == trained_epochs and len(validated_epochs) > 1:
        yield Suggestion(
            f"--epochs={format_epochs(1.5 * epochs)}",
            "validation accuracy was still rising in the last epoch",
        )


def _suggest_regularization(run: LoadedRun, gap: float) -> Iterator[Suggestion]:
    gap_text = f"training accuracy is {100 * gap:.1f} points above validation accuracy"
    if not run.flags.get("label_smoothing"):
        yield Suggestion(
            "--label_smoothing=0.1",
            f"{gap_text}; smoothed labels regularize, but the training loss is another one",
        )
    if run.flags.get("batch_norm") == "last":
        yield Suggestion(
            "--batch_norm=precise",
            f"{gap_text}; statistics of one small batch may be the cause. Training stays the same",
        )


def _suggest_learning_rate(
    run: LoadedRun, training: float, validation: float | None
) -> Iterator[Suggestion]:
    """Suggests a learning rate for a run whose training accuracy is below its target.

    Args:
      run: The run.
      training: Its last training accuracy, a fraction.
      validation: Its last validation accuracy, a fraction, if known.
    """
    learning_rate = run.flags.get("lr")
    if not learning_rate or run.flags.get("lr_schedule") in FIXED_SCHEDULES:
        return
    best = run.summary.get("best_val_top1")
    if validation is not None and best is not None and best - validation > _UNSTEADY_ACCURACY_DROP:
        # A higher learning rate would make it less steady.
        best_epoch = format_epochs(run.summary.get("best_epoch") or 0)
        yield Suggestion(
            f"--lr={learning_rate / 2:g}",
            f"validation accuracy fell from {format_accuracy(best)} in epoch {best_epoch} to"
            f" {format_accuracy(validation)} at the end: a lower learning rate is steadier",
        )
        return
    yield Suggestion(
        f"--lr={2 * learning_rate:g}",
        f"even training accuracy is only {format_accuracy(training)}: a higher learning rate, or"
        " more epochs",
    )


def _suggest_for_time(run: LoadedRun, cause: str, fraction: float) -> Iterator[Suggestion]:
    """Suggests how to reduce one cause of time.

    Args:
      run: The run.
      cause: A key of `time_fractions`.
      fraction: Its fraction of the run's time.
    """
    minimum = _MIN_FRACTION_FOR_ADVICE
    if cause == "evaluation":
        minimum = _MIN_EVALUATION_FRACTION_FOR_ADVICE
    if fraction < minimum:
        return
    lost_time = f"{_format_share(fraction)} went into"
    if cause == "input":
        yield from _suggest_for_input(run, lost_time)
    elif cause == "exposed communication":
        yield from _suggest_for_communication(run, lost_time)
    elif cause == "slowest rank":
        has_several_hosts = len(set(run.environment.get("hosts") or [])) > 1
        hosts = " -H HOSTS" if has_several_hosts else ""
        rank = describe_slowest_rank(run) or "a rank"
        yield Suggestion(
            f"hybrid-imagenet doctor{hosts}",
            f"{lost_time} waiting for {rank}: look for other programs on its cores",
        )
    elif cause == "evaluation":
        interval = float(run.flags.get("eval_every_epochs") or 1)
        yield Suggestion(f"--eval_every_epochs={2 * interval:g}", f"{lost_time} evaluation")
    elif cause == "checkpoints":
        interval = float(run.flags.get("checkpoint_every_epochs") or 1)
        yield Suggestion(
            f"--checkpoint_every_epochs={2 * interval:g}", f"{lost_time} waiting for checkpoints"
        )


def _suggest_for_input(run: LoadedRun, lost_time: str) -> Iterator[Suggestion]:
    # The digits are few, and synthetic images are made for tests of speed.
    dataset = str(run.flags.get("dataset"))
    if dataset not in ("digits", "synthetic", "synthetic_tensors"):
        yield Suggestion(
            f"hybrid-imagenet data prepare --from={dataset} --resize=256",
            f"{lost_time} waiting for input; smaller images are decoded about twice as fast, but"
            " they are other images",
        )


def _suggest_for_communication(run: LoadedRun, lost_time: str) -> Iterator[Suggestion]:
    world_size = run.summary["world_size"]
    if run.flags.get("compression") == "none":
        yield Suggestion(
            "--compression=fp16",
            f"{lost_time} communication; this halves the bytes sent, and rounds gradients to FP16",
        )
    if world_size > 2:
        yield Suggestion(
            f"hybrid-imagenet run -np {world_size} --module=hybrid_imagenet.benchmarks"
            " -- allreduce",
            f"{lost_time} communication; this compares algorithms",
        )
    accumulation_steps = int(run.flags.get("gradient_accumulation_steps") or 1)
    yield Suggestion(
        f"--gradient_accumulation_steps={2 * accumulation_steps}",
        f"{lost_time} communication; this halves the number of exchanges. It changes the"
        " optimization: the batch is twice as large, which needs another learning rate",
    )
