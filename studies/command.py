"""`python -m studies NAME`: a comparison of methods with several seeds, as table and plot."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib.util
import itertools
import pathlib
import shlex
import sys
from collections.abc import Iterator, Sequence

from hybrid_imagenet import config as configuration
from hybrid_imagenet.benchmarks import scaling
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.data import datasets
from hybrid_imagenet.errors import EXIT_FAILURE, EXIT_OK, UserError, did_you_mean
from hybrid_imagenet.options import parse_arguments
from studies import cost, jobs, plot, running, tables, trial_runs, tuning
from studies.base import Arm, Study
from studies.batch_norm import BATCH_NORM
from studies.decay import DECAY, DECAY_2048
from studies.definitions import STUDIES as OF_PAPERS
from studies.figure_3_1 import FIGURE_3_1
from studies.full_form import FULL_FORM, FULL_FORM_SMALL
from studies.handover import HANDOVER, HANDOVER_256
from studies.optimizers import OPTIMIZERS_BY_BATCH
from studies.questions import ACCURACY_BY_BATCH, WARMUP_METHOD
from studies.rate_curves import ADABOUND_BOUNDS_256, RATE_CURVES
from studies.recipe_step import RECIPE_STEP
from studies.recorded_runs import Records
from studies.results import ArmResults
from studies.short_parts import SHORT_PARTS
from studies.trial_runs import Cell

STUDIES = OF_PAPERS | {
    study.name: study
    for study in (
        *(
            BATCH_NORM,
            ACCURACY_BY_BATCH,
            WARMUP_METHOD,
            OPTIMIZERS_BY_BATCH,
            DECAY,
            DECAY_2048,
            FIGURE_3_1,
            RATE_CURVES,
            ADABOUND_BOUNDS_256,
        ),
        *(HANDOVER, HANDOVER_256, SHORT_PARTS),
        RECIPE_STEP,
        *(FULL_FORM, FULL_FORM_SMALL),
    )
}


def _parser() -> command_line.Parser:
    wide = max(map(len, STUDIES))
    parser = command_line.Parser(
        prog="python -m studies",
        description=(
            "Trains each method of a study once per seed, and writes a table and a plot. Runs that"
            " have finished are kept in --out; started again, only what is missing or failed is"
            " run."
        ),
        epilog="\n".join(
            [
                (
                    "Flags after -- go to every training run and win over the study's. `list`"
                    " describes the arms of:"
                ),
                *(f"  {name:<{wide}}  {study.title}" for name, study in STUDIES.items()),
            ]
        ),
    )
    parser.add_argument("study", metavar="NAME", help="a study, or `list`")
    parser.add_argument("--out", default="runs/studies", help="directory of the runs (%(default)s)")
    parser.add_argument(
        "--results", help="directory for NAME.csv, NAME.md and NAME.png (default: --out)"
    )
    parser.add_argument(
        "--records",
        help="directory with CSV files of studies, such as studies/records: runs in them with equal"
        " flags are not run again",
    )
    parser.add_argument(
        "--seeds",
        type=command_line.positive_int,
        default=3,
        help="runs of each method, by seed (%(default)s)",
    )
    parser.add_argument(
        "--ranks",
        type=command_line.positive_int,
        default=tables.DEFAULT_RANKS,
        help="ranks of each run (%(default)s)",
    )
    parser.add_argument(
        "--jobs",
        type=command_line.positive_int,
        default=1,
        help="runs at the same time on this host; they share its GPUs and cores (%(default)s)",
    )
    parser.add_argument(
        "--launcher",
        choices=running.LAUNCHERS,
        default="mpirun",
        help="starts the ranks (%(default)s)",
    )
    parser.add_argument(
        "--images_per_second",
        type=command_line.positive_float,
        default=1800.0,
        help="throughput of a run, for the hours printed before it starts (%(default)s)",
    )
    parser.add_argument(
        "--arms", help="run these arms only: names or patterns such as *_1024, separated by commas"
    )
    parser.add_argument("--dry_run", action="store_true", help="print the commands and run nothing")
    parser.add_argument(
        "--render",
        action="store_true",
        help="run nothing: write table and plot of the runs in --out",
    )
    return parser


def list_text() -> list[str]:
    """The studies with their sources and arms."""
    width = max(map(len, STUDIES))
    lines = []
    for name, study in STUDIES.items():
        lines += [
            f"{name:<{width}}  {study.title}: {'; '.join(arm.label for arm in study.arms)}",
            f"{'':<{width}}  {study.source or 'a question of ours'}",
        ]
    return lines


def main(arguments: Sequence[str]) -> int:
    """Runs the program; returns the exit code (see `hybrid_imagenet.errors`)."""
    if list(arguments)[:1] == ["list"]:
        print("\n".join(list_text()))
        return EXIT_OK
    return running.resumable(lambda: EXIT_OK if _study(*parse(arguments)) else EXIT_FAILURE)


def parse(arguments: Sequence[str]) -> tuple[Study, argparse.Namespace, tuple[str, ...]]:
    """The study, this program's options and the flags for the training program.

    Raises:
      UserError: One line that names what is wrong.
    """
    own, extra = scaling.split_arguments(arguments)
    options = _parser().parse_args(own)
    name = options.study
    if name not in STUDIES:
        raise UserError(
            f"{name}: choose one of {', '.join(STUDIES)} or list{did_you_mean(name, STUDIES)}"
        )
    given = parse_arguments(
        itertools.chain(*configuration.split_flagfiles(extra)), configuration.OPTIONS
    ).keys()
    for flag in given & {"run_dir", "seed", "resume"}:
        raise UserError(f"--{flag} after --: the study gives every run its own; omit it")
    for flag in given & _varied(STUDIES[name]):
        raise UserError(f"--{flag} after --: the arms of {name} differ in it; omit it")
    names = [arm.name for arm in STUDIES[name].arms]
    for pattern in options.arms.split(",") if options.arms is not None else ():
        if not fnmatch.filter(names, pattern):
            raise UserError(f"--arms={options.arms}: {pattern} is none of {', '.join(names)}")
    study = STUDIES[name]
    if options.ranks > 1 and "virtual_gpus" not in given:
        gpus = max(
            configuration.resolve(study.arguments(arm, 0, extra)).optimization.virtual_gpus
            for arm in study.arms
        )
        if gpus > 1:
            raise UserError(
                f"--ranks={options.ranks}: the batch of {name} is that of one rank with {gpus}"
                " virtual GPUs; give --ranks=1, or --virtual_gpus after --"
            )
    return study, options, tuple(extra)


def _varied(study: Study) -> set[str]:
    """The flags that not all arms and points of a study have alike."""
    cells = [
        (*arm.flags, *point)
        for arm in study.arms
        for point in [p.flags for p in arm.points] or [()]
    ]
    values = [parse_arguments(cell, configuration.OPTIONS) for cell in cells]
    return {
        name
        for found in values
        for name in found
        if any(found[name] != other.get(name) for other in values)
    }


def _takes(options: argparse.Namespace, arm: Arm) -> bool:
    """Whether an arm's runs are wanted."""
    return options.arms is None or any(
        fnmatch.fnmatchcase(arm.name, pattern) for pattern in options.arms.split(",")
    )


def _study(study: Study, options: argparse.Namespace, extra: tuple[str, ...]) -> bool:
    """Tunes, runs and writes one study.

    Returns:
      Whether all runs that were asked for have finished.
    """
    # Every flag is checked before the first run starts: those of the tuning runs are those of all
    # points.
    trials = tuning.plan(study, pathlib.Path(options.out).absolute(), options.ranks, extra)
    planned = [] if trials else list(_cells(study, options, extra))
    runs = [(t.arm, t.cell) for t in trials] or [(arm, cell) for arm, _, cell in planned]
    if _announce(study, options, runs):
        return True
    if not options.render:
        _check_data(study, [cell for arm, cell in runs if _takes(options, arm)])
    records = Records(pathlib.Path(options.records)) if options.records else None
    tried: dict[Cell, trial_runs.Result] = {}
    for stage in (tuning.first_stage, tuning.second_stage):
        tried |= _results(study, _names(stage(study, trials, tried)), options, records)
    trials = [trial for trial in trials if trial.cell in tried]
    choices = tuning.choose(study, trials, tried)
    study = tuning.reported(study, choices)
    planned = planned or list(_cells(study, options, extra))
    results = _results(
        study,
        [(arm, f"{arm.name}, seed {seed}", cell) for arm, seed, cell in planned],
        options,
        records,
    )
    found = {arm.name: tuning.untuned(arm, range(options.seeds)) for arm in study.arms}
    for arm, seed, cell in planned:
        found[arm.name][seed] = results[cell]
    target = configuration.resolve([*results, *tried][0].flags).evaluation.target_top1[0]
    arms = [ArmResults(arm, found[arm.name], target) for arm in study.arms]
    lines = tuning.lines(choices, study.tuning_seeds)
    directory = pathlib.Path(options.results or options.out)
    tuning_csv = tables.tuning_to_csv(study, trials, tried, choices) if trials else ""
    for path in write(directory, study, arms, options.seeds, extra, lines, tuning_csv):
        _say(str(path))
    return all(
        len(each.finished) == len(each.by_seed) for each in arms if _takes(options, each.arm)
    )


def _names(trials: Sequence[tuning.Trial]) -> list[tuple[Arm, str, Cell]]:
    return [(t.arm, f"tuning {t.arm.name}, {t.point.label}, seed {t.seed}", t.cell) for t in trials]


def _check_data(study: Study, cells: Sequence[Cell]) -> None:
    """Looks for the dataset before the first run starts, so that not every run fails by itself.

    Raises:
      UserError: If --data_dir is missing, or the files in it are.
    """
    cell = next((cell for cell in cells if not _has_ended(cell)), None)
    if cell is None:
        return
    # All runs of a study read the same dataset.
    config = configuration.resolve(cell.flags)
    if config.data.data_dir:
        datasets.probe_splits(datasets.DatasetRequest.from_flags(config.data))
    elif datasets.source_type(config.data.dataset).requires_data_dir:
        raise UserError(
            f"{study.name} reads its images from a directory. Add `-- --data_dir=DIR` at the end of"
            " the command."
        )


def _announce(study: Study, options: argparse.Namespace, runs: Sequence[tuple[Arm, Cell]]) -> bool:
    """Prints what a study will cost or, for a dry run, its commands.

    Returns:
      Whether that is all that was asked for.
    """
    cells = [cell for arm, cell in runs if _takes(options, arm)]
    later = options.seeds * sum(bool(arm.points) for arm in study.arms if _takes(options, arm))
    if options.dry_run:
        for cell in cells:
            print(shlex.join(running.command(cell, options.launcher)))
        if later:
            print(
                f"# then the best point of each arm with seeds 0 to {options.seeds - 1}: {later}"
                " runs"
            )
    if cells and (options.dry_run or not options.render):
        mark = "# " if options.dry_run else ""
        _say(f"{mark}{study.name}: {cost.line(cells, options.images_per_second, later)}")
    return options.dry_run


def _results(
    study: Study,
    runs: Sequence[tuple[Arm, str, Cell]],
    options: argparse.Namespace,
    records: Records | None,
) -> dict[Cell, trial_runs.Result]:
    """Returns the results of cells, and runs those of the requested arms that have none.

    Each of these runs is reported when it ends.

    Args:
      study: Study to which the cells belong.
      runs: The arm of each, and what to call it.
      options: Options of the program.
      records: Records of runs that need no directory.
    """
    recorded = {}
    for _, name, cell in runs:
        result = records.find(cell) if records and not _has_ended(cell) else None
        if result is not None:
            recorded[cell] = result
            _say(f"{study.name} {name}: {_line(result, False)}")
    names = {
        cell: name for arm, name, cell in runs if _takes(options, arm) and cell not in recorded
    }
    cells = list(names)
    found = recorded | {
        cell: trial_runs.read(cell)
        for _, _, cell in runs
        if cell not in names and cell not in recorded
    }
    if options.render:
        ended = (
            jobs.Ended(number, trial_runs.read(cell), False) for number, cell in enumerate(cells)
        )
    else:
        ended = jobs.ended(cells, options.launcher, options.jobs)
    with contextlib.closing(ended):
        for count, end in enumerate(ended, 1):
            cell = cells[end.number]
            found[cell] = end.result
            _say(f"{study.name} {count}/{len(cells)} {names[cell]}: {_line(end.result, end.ran)}")
    return found


def _has_ended(cell: Cell) -> bool:
    """Whether a run is not run again: it has finished or diverged."""
    return trial_runs.read(cell).status in (trial_runs.FINISHED, trial_runs.DIVERGED)


def _cells(
    study: Study, options: argparse.Namespace, extra: tuple[str, ...]
) -> Iterator[tuple[Arm, int, Cell]]:
    """Seed by seed, so that a study that was cut short has all arms that are tuned."""
    out = pathlib.Path(options.out).absolute()
    for seed in range(options.seeds):
        for arm in study.arms:
            if arm.points:
                continue
            yield (
                arm,
                seed,
                trial_runs.create(out, study.arguments(arm, seed, extra), options.ranks),
            )


def _line(result: trial_runs.Result, ran: bool) -> str:
    if result.status == trial_runs.FINISHED:
        return f"{100 * result.summary['val_top1']:.2f} %" + ("" if ran else " (kept)")
    return result.status + (f" ({result.reason})" if result.reason else "")


def _say(text: str) -> None:
    print(text, flush=True)


def write(
    directory: pathlib.Path,
    study: Study,
    arms: Sequence[ArmResults],
    seeds: int,
    extra: Sequence[str],
    tuning_lines: Sequence[str] = (),
    tuning_csv: str = "",
) -> list[pathlib.Path]:
    """Writes the study's CSV, Markdown and, with matplotlib, PNG; returns their paths.

    Args:
      directory: Directory to which they are written.
      study: Study with the chosen point of each arm.
      arms: Arms with the results of the reported runs.
      seeds: Reported runs of each arm.
      extra: Flags that every run had.
      tuning_lines: The part of the page about the tuning.
      tuning_csv: One row per tuning run, for a separate CSV file; empty without tuning.

    Raises:
      UserError: If they cannot be written.
    """
    drawn = importlib.util.find_spec("matplotlib") is not None
    paths = [directory / f"{study.name}.csv", directory / f"{study.name}.md"]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(tables.to_csv(study, arms, extra), encoding="utf-8")
        paths[1].write_text(
            tables.to_markdown(study, arms, seeds, extra, drawn, tuning_lines), encoding="utf-8"
        )
        if tuning_csv:
            paths.append(directory / f"{study.name}-tuning.csv")
            paths[-1].write_text(tuning_csv, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--results={directory}: {error.strerror}; give a directory that can be written"
        ) from None
    if drawn:
        paths.append(directory / f"{study.name}.png")
        plot.draw(paths[-1], study, arms)
    else:
        print("no PNG: matplotlib is not installed; pip install matplotlib", file=sys.stderr)
    return paths
