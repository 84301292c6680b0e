"""Writes a study's results as CSV (one row per run) and Markdown (one row per arm)."""

from __future__ import annotations

import csv
import dataclasses
import io
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from studies import hypotheses, results, trial_runs, tuning
from studies.base import Claim, Study
from studies.hypotheses import LEVEL, POWER
from studies.results import ArmResults, Verdict
from studies.statistics import CONFIDENCE, Estimate

DEFAULT_RANKS = 1
COLUMNS = (
    *(
        "study",
        "arm",
        "seed",
        "status",
        "val_top1",
        "best_val_top1",
        "epochs_to_target",
        "target",
        "val_loss",
    ),
    *(
        "train_top1",
        "skipped_steps",
        "paper_top1",
        "paper_epochs",
        "val_top1_by_epoch",
        "train_top1_by_epoch",
    ),
    *("flags", "reason"),
)
TUNING_COLUMNS = (
    "study",
    "arm",
    "point",
    "chosen",
    "seed",
    "status",
    "val_top1",
    "train_top1",
    "flags",
    "reason",
)
_OF_SUMMARY = ("val_top1", "best_val_top1", "val_loss", "train_top1", "skipped_steps")


def to_csv(study: Study, arms: Sequence[ArmResults], extra: Sequence[str] = ()) -> str:
    """One row per arm and seed; fractions for accuracies, empty fields for what is not known."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for found in arms:
        for seed, result in sorted(found.by_seed.items()):
            writer.writerow(
                {
                    "study": study.name,
                    "arm": found.arm.name,
                    "seed": seed,
                    "status": result.status,
                    **{key: _exact(result.summary.get(key)) for key in _OF_SUMMARY},
                    "epochs_to_target": _exact(results.value(result, "epochs", found.target)),
                    "target": found.target,
                    "paper_top1": _exact(found.arm.top1),
                    "paper_epochs": _exact(found.arm.epochs),
                    "val_top1_by_epoch": _series(result, "val_top1"),
                    "train_top1_by_epoch": _series(result, "train_top1"),
                    "flags": shlex.join(_without_place(study.arguments(found.arm, seed, extra))),
                    "reason": result.reason,
                }
            )
    return text.getvalue()


def tuning_to_csv(
    study: Study,
    trials: Sequence[tuning.Trial],
    found: Mapping[trial_runs.Cell, trial_runs.Result],
    choices: Sequence[tuning.Choice],
) -> str:
    """Returns one row per tuning run: arm, point and seed, and whether its point was chosen.

    Args:
      study: Study that was tuned.
      trials: Its tuning runs.
      found: The result of each.
      choices: Choices of its arms.
    """
    chosen = {(choice.arm.name, choice.point.label) for choice in choices if not choice.missing}
    text = io.StringIO()
    writer = csv.DictWriter(text, TUNING_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for trial in sorted(trials, key=lambda trial: _place(study, trial)):
        result = found[trial.cell]
        writer.writerow(
            {
                "study": study.name,
                "arm": trial.arm.name,
                "point": trial.point.label,
                "chosen": int((trial.arm.name, trial.point.label) in chosen),
                "seed": trial.seed,
                "status": result.status,
                "val_top1": _exact(result.summary.get("val_top1")),
                "train_top1": _exact(result.summary.get("train_top1")),
                "flags": shlex.join(_without_place(trial.cell.flags)),
                "reason": result.reason,
            }
        )
    return text.getvalue()


def _place(study: Study, trial: tuning.Trial) -> tuple[int, int, int]:
    """Returns the key by which tuning runs are sorted: arm, point and seed."""
    arms = [arm.name for arm in study.arms]
    return arms.index(trial.arm.name), trial.arm.points.index(trial.point), trial.seed


def _exact(number: float | None) -> str:
    return "" if number is None else f"{number:.6g}"


def _series(result: trial_runs.Result, key: str) -> str:
    return " ".join(_exact(record.get(key)) or "-" for record in result.epochs)


def to_markdown(
    study: Study,
    arms: Sequence[ArmResults],
    seeds: int,
    extra: Sequence[str],
    plot: bool,
    tuning_lines: Sequence[str] = (),
) -> str:
    """The page of a study; `tuning_lines` are about how its arms were tuned."""
    found = results.verdicts(study, arms)
    return "\n".join(
        [
            f"# {study.title}",
            "",
            *(
                [f"After {study.source}.", f"The paper: {study.statement}"]
                if study.source
                else [study.statement]
            ),
            "",
            f"**{results.sentence(found)}**",
            "",
            *_unfinished(arms),
            *_table(study, arms),
            "",
            *([f"![{study.title}]({study.name}.png)", ""] if plot else []),
            *_statements(found, arms),
            *_shares(arms),
            *tuning_lines,
            *_setting(study, arms, seeds, extra),
            *(f"- {note}" for note in study.notes),
            f"- All runs, with their flags and accuracy by epoch: `{study.name}.csv`.",
            "",
        ]
    )


def _unfinished(arms: Sequence[ArmResults]) -> Iterator[str]:
    """Says how much of a study is there, if not all of it is."""
    planned, there = (
        sum(map(len, counts)) for counts in zip(*((a.by_seed, a.ended) for a in arms), strict=True)
    )
    if there < planned:
        waiting = sum(bool(each.arm.points) for each in arms)
        yield f"Unfinished: {there} of {planned} runs are there" + (
            f"; {waiting} of {len(arms)} arms are not tuned yet." if waiting else "."
        )
        yield ""


def _table(study: Study, arms: Sequence[ArmResults]) -> Iterator[str]:
    target = percent(arms[0].target, 0)
    with_chosen = any(found.arm.chosen for found in arms)
    header = [
        "",
        *(["chosen in tuning"] if with_chosen else []),
        "final top-1",
        "best top-1",
        f"epochs to {target}",
    ]
    with_updates = all(found.arm.batch for found in arms)
    header += [f"updates to {percent(results.TRAINED, 0)} in training"] if with_updates else []
    header += ["runs", "paper: top-1"]
    with_epochs = any(found.arm.epochs is not None for found in arms)
    header += ["paper: epochs to 75 %"] if with_epochs else []
    header = header if study.source else header[:-1]
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for found in arms:
        arm = found.arm
        row = [
            arm.label,
            *([arm.chosen or "-"] if with_chosen else []),
            _mean(found.estimate("top1"), ".2f", 100, " %"),
            _mean(found.estimate("best"), ".2f", 100, " %"),
            _epochs(found),
            *([_mean(found.estimate("updates"), ",.0f")] if with_updates else []),
            _runs(found),
            "-" if arm.top1 is None else ("about " if arm.about else "") + percent(arm.top1),
        ]
        row += ["-" if arm.epochs is None else f"{arm.epochs:g}"] if with_epochs else []
        yield "| " + " | ".join(row[: len(header)]) + " |"
    yield ""
    yield f"Mean ± {CONFIDENCE:.0%} confidence interval over the seeds (Student's t).".replace(
        "%", " %"
    )


def percent(fraction: float, digits: int = 2) -> str:
    """A fraction as 75.60 %."""
    return f"{100 * fraction:.{digits}f} %"


def _mean(found: Estimate | None, form: str, scale: float = 1.0, unit: str = "") -> str:
    if found is None:
        return "-"
    spread = "" if found.half_width is None else f" ± {scale * found.half_width:{form}}"
    return f"{scale * found.mean:{form}}{spread}{unit}"


def _epochs(found: ArmResults) -> str:
    reached = found.estimate("epochs")
    count = len(found.finished)
    if reached is None:
        return "not reached" if count else "-"
    return _mean(
        reached, ".1f", unit=f" ({reached.count} of {count} runs)" if reached.count < count else ""
    )


def _runs(found: ArmResults) -> str:
    """Returns the number of finished runs and the reasons why the others did not finish."""
    total = len(found.by_seed)
    if found.arm.points:
        return tuning.NOT_TUNED
    text = (
        f"{len(found.finished)}"
        if len(found.finished) == total
        else f"{len(found.finished)} of {total}"
    )
    for status in (trial_runs.DIVERGED, trial_runs.FAILED, trial_runs.MISSING):
        seeds = [
            str(seed) for seed, result in sorted(found.by_seed.items()) if result.status == status
        ]
        if seeds:
            text += f"; {status}: seed {', '.join(seeds)}"
    return text


def _statements(found: Sequence[Verdict], arms: Sequence[ArmResults]) -> Iterator[str]:
    if not found:
        return
    labels = {each.arm.name: each.arm.label for each in arms}
    resampled = any(verdict.resampled for verdict in found)
    printed = any(verdict.effect is not None for verdict in found)
    header = [
        "statement",
        "whose",
        "difference here",
        "without pairs",
        *(["over images too"] if resampled else []),
    ]
    header += ["p", "outcome", *(["the paper's difference"] if printed else [])]
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for verdict in found:
        row = [
            _statement(verdict.claim, labels),
            "the paper's" if verdict.claim.by_paper else "ours",
            _difference(verdict),
            (
                "-"
                if verdict.welch is None
                else _difference(dataclasses.replace(verdict, difference=verdict.welch))
            ),
            *([_interval(verdict)] if resampled else []),
            "-" if verdict.p is None else f"{verdict.p:.3f}",
            _outcome(verdict),
            *([_against_paper(verdict)] if printed else []),
        ]
        yield "| " + " | ".join(row) + " |"
    yield ""
    yield (
        "Differences are taken between runs of equal seed, with Student's interval of their mean;"
        " positive favors the"
    )
    yield (
        "first. Without pairs the interval is Welch's. Better is a one-sided test, as good as two"
        " of them against the"
    )
    yield "margin (TOST); p is corrected for all statements of the study (Holm), and at most"
    yield (
        f"{LEVEL:g} decides. Otherwise the number of seeds is given that would decide with a"
        " chance of"
    )
    yield f"{100 * POWER:.0f} % if further runs differ as these do."
    if resampled:
        yield "The interval over images too is a bootstrap over seeds and validation images."
    yield ""


def _shares(arms: Sequence[ArmResults]) -> Iterator[str]:
    """Writes how many runs of each arm reached the target, where some did not."""
    finished = [found for found in arms if found.finished]
    reached = [len(found.values("epochs")) for found in finished]
    runs = [len(found.finished) for found in finished]
    if not finished or reached == runs:
        return
    first = finished[0].arm.label
    yield f"| | runs that reached {percent(arms[0].target, 0)} | p against {first} |"
    yield "|---|---|---|"
    for number, found in enumerate(finished):
        p = hypotheses.p_shares(reached[0], runs[0], reached[number], runs[number])
        shown = f"{p:.2g}" if number else "-"
        yield f"| {found.arm.label} | {reached[number]} of {runs[number]} | {shown} |"
    yield ""
    yield "p is from Fisher's exact test, two-sided, and is not corrected for the number of arms."
    yield ""


def _statement(claim: Claim, labels: Mapping[str, str]) -> str:
    if claim.metric == "oscillation" and claim.relation == "above":
        return (
            f"{labels[claim.first]}: oscillates more than {labels[claim.second]}, second half of"
            " the run"
        )
    what = {"top1": "in final top-1", "epochs": "in epochs to the target"}[claim.metric]
    if claim.relation != "equal":
        return f"{labels[claim.first]}: better than {labels[claim.second]}, {what}"
    scale, unit, _ = _UNITS[claim.metric]
    return (
        f"{labels[claim.first]}: as good as {labels[claim.second]} within {scale * claim.margin:g}"
        f" {unit}, {what}"
    )


def _outcome(verdict: Verdict) -> str:
    if verdict.outcome == results.OPEN:
        return "not comparable: no common runs, or both missed the target"
    if verdict.outcome != results.INCONCLUSIVE:
        return verdict.outcome
    if verdict.seeds is None:
        return "inconclusive"
    return f"inconclusive: {verdict.seeds} seeds would decide"


def _against_paper(verdict: Verdict) -> str:
    return (
        "-"
        if verdict.effect is None
        else f"{100 * verdict.effect:+.2f} points: {verdict.against_paper}"
    )


_UNITS = {"top1": (100, "points", 2), "oscillation": (100, "points", 2), "epochs": (1, "epochs", 1)}


def _difference(verdict: Verdict) -> str:
    found = verdict.difference
    if found is None:
        return "-"
    scale, unit, digits = _UNITS[verdict.claim.metric]
    spread = "" if found.half_width is None else f" ± {scale * found.half_width:.{digits}f}"
    limit = f"{verdict.limit} " if verdict.limit else ""
    return f"{limit}{scale * found.mean:+.{digits}f}{spread} {unit}"


def _interval(verdict: Verdict) -> str:
    if verdict.resampled is None:
        return "-"
    low, high = (100 * end for end in verdict.resampled)
    return f"{low:+.2f} to {high:+.2f} points"


def _setting(
    study: Study, arms: Sequence[ArmResults], seeds: int, extra: Sequence[str]
) -> Iterator[str]:
    """Command, data, network and versions."""
    known = results.facts(arms)
    tail = f" -- {shlex.join(_without_place(extra))}" if extra else ""
    yield "## How it was run"
    yield ""
    ranks = known.get("world_size", DEFAULT_RANKS)
    number = "" if ranks == DEFAULT_RANKS else f" --ranks={ranks}"
    yield f"    python -m studies {study.name}{number} --seeds={seeds}{tail}"
    yield ""
    yield f"- Every arm: `{shlex.join(_effective(study.base))}`"
    for found in arms:
        flags = f"`{shlex.join(found.arm.flags)}`" if found.arm.flags else "nothing else"
        yield f"- {found.arm.label}: {flags}"
    if known:
        yield "- " + _versions(known)


def _without_place(flags: Sequence[str]) -> list[str]:
    """Flags whose data directory is DIR: where it lay says nothing to a reader."""
    return ["--data_dir=DIR" if flag.startswith("--data_dir=") else flag for flag in flags]


def _effective(flags: Sequence[str]) -> list[str]:
    """Flags without those that a later one of the same name replaces."""
    return list({flag.partition("=")[0]: flag for flag in flags}.values())


def _versions(known: dict[str, Any]) -> str:
    size = known.get("world_size")
    return (
        f"{known.get('train_images')} training and {known.get('validation_images')} validation"
        f" images of {known.get('num_classes')} classes, {size} rank{'' if size == 1 else 's'},"
        f" {'GPU' if known.get('gpu', 'none') != 'none' else 'CPU'}; TensorFlow"
        f" {known.get('tensorflow')}, Keras {known.get('keras')}, Python {known.get('python')},"
        f" hybrid_imagenet {known.get('version')}."
    )
