"""`hybrid-imagenet study NAME`: a comparison of methods with several seeds, as table and plot."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import fnmatch
import pathlib
import shlex
import sys
import typing
from collections.abc import Iterator, Sequence

from hybrid_imagenet import config as configuration
from hybrid_imagenet.config.help import entries
from hybrid_imagenet.config.options import option, options_of, parse_arguments, parse_value, value_type
from hybrid_imagenet.errors import EXIT_FAILURE, EXIT_OK, UserError
from hybrid_imagenet.tools.study import cost, jobs, plot, running, tables, trial_runs, tuning
from hybrid_imagenet.tools.study.base import TARGET, Arm, Study
from hybrid_imagenet.tools.study.batch_norm import BATCH_NORM
from hybrid_imagenet.tools.study.decay import DECAY
from hybrid_imagenet.tools.study.definitions import STUDIES as AFTER_PAPERS
from hybrid_imagenet.tools.study.optimizers import COMPARED
from hybrid_imagenet.tools.study.questions import QUESTIONS
from hybrid_imagenet.tools.study.results import ArmResults
from hybrid_imagenet.tools.study.short_parts import SHORT_PARTS
from hybrid_imagenet.tools.study.shuffle_window import SHUFFLE_WINDOW
from hybrid_imagenet.tools.study.trial_runs import Cell

STUDIES = {
    **AFTER_PAPERS,
    BATCH_NORM.name: BATCH_NORM,
    **QUESTIONS,
    **COMPARED,
    DECAY.name: DECAY,
    SHORT_PARTS.name: SHORT_PARTS,
    SHUFFLE_WINDOW.name: SHUFFLE_WINDOW,
}
_USAGE = """usage: hybrid-imagenet study NAME [--name=value ...] [-- FLAG ...]

NAME is one of the studies below, `all` (those on the digits), or `list`. Flags after -- go to every training run and
win over the study's. What a study costs is said before it starts.
Each method is trained once per seed. Runs that have finished are kept in --out; started again, only what is missing or
failed is run.
"""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Flags of this program."""

    out: str = option("studies", "Directory of the runs.")
    results: str | None = option(None, "Directory for NAME.csv, NAME.md and NAME.png; default --out.")
    seeds: int = option(3, "Runs of each method, with seeds 0, 1, ...", minimum=1)
    ranks: int = option(tables.DEFAULT_RANKS, "Ranks of each run.", minimum=1)
    jobs: int = option(1, "Runs at once on this host: they divide its GPUs and cores among them.", minimum=1)
    launcher: str = option("mpirun", "What starts the ranks.", choices=running.LAUNCHERS)
    images_per_second: float = option(1800.0, "Of a run: for the hours printed before it starts.", minimum=1e-9)
    arms: str | None = option(
        None, "Run these arms only: names or patterns such as *_1024, by commas. The page has the others as they are."
    )
    dry_run: bool = option(False, "Print the commands that would be run, and nothing else.")
    render: bool = option(False, "Run nothing: write table and plot from the runs that are there.")

    def takes(self, arm: Arm) -> bool:
        """Whether an arm's runs are to be run or told."""
        return self.arms is None or any(fnmatch.fnmatchcase(arm.name, pattern) for pattern in self.arms.split(","))


OPTIONS = options_of(Settings)


def help_text() -> str:
    """Usage, studies and flags with their defaults."""
    return "\n".join([_USAGE, *list_text(), "", *entries(Settings)])


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
    """Runs the program; returns the exit code."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(help_text())
        return EXIT_OK if arguments else UserError.exit_code
    if arguments[0] == "list":
        print("\n".join(list_text()))
        return EXIT_OK
    return running.resumable(lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    studies, settings, extra = parse(arguments)
    complete = [_study(study, settings, extra) for study in studies]
    return EXIT_OK if all(complete) else EXIT_FAILURE


def parse(arguments: Sequence[str]) -> tuple[list[Study], Settings, tuple[str, ...]]:
    """The studies, this program's flags and those for the training program.

    Raises:
      UserError: one line that names what is wrong.
    """
    own = list(arguments)
    extra: tuple[str, ...] = ()
    if "--" in own:
        at = own.index("--")
        own, extra = own[:at], tuple(own[at + 1 :])
    names = [word for word in own if not word.startswith("-")]
    if len(names) != 1:
        raise UserError(f"give one study: {', '.join(STUDIES)}, or all; flags are written --name=value")
    name = names[0]
    if name != "all" and name not in STUDIES:
        near = difflib.get_close_matches(name, STUDIES, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(f"{name}: choose one of {', '.join(STUDIES)}, all or list{hint}")
    kinds = {key: value_type(hint) for key, hint in typing.get_type_hints(Settings).items() if key in OPTIONS}
    texts = parse_arguments([word for word in own if word.startswith("-")], kinds)
    settings = Settings(**{key: parse_value(key, text, kinds[key], OPTIONS[key]) for key, text in texts.items()})
    for flag in ("--run_dir", "--seed", "--resume"):
        if any(word.split("=")[0] == flag for word in extra):
            raise UserError(f"{flag} after --: the study gives every run its own; leave it out")
    studies = list(AFTER_PAPERS.values()) if name == "all" else [STUDIES[name]]
    names = [arm.name for study in studies for arm in study.arms]
    for pattern in settings.arms.split(",") if settings.arms is not None else ():
        if not fnmatch.filter(names, pattern):
            raise UserError(f"--arms={settings.arms}: {pattern} is none of {', '.join(names)}")
    return studies, settings, extra


def _study(study: Study, settings: Settings, extra: tuple[str, ...]) -> bool:
    """Tunes, runs and writes one study; returns whether all runs that were asked for have finished."""
    # Every flag is checked before the first run starts: those of the tuning runs are those of all points.
    trials = tuning.plan(study, pathlib.Path(settings.out).absolute(), settings.ranks, extra)
    planned = [] if trials else list(_cells(study, settings, extra))
    if _announce(study, settings, [(t.arm, t.cell) for t in trials] or [(arm, cell) for arm, _, cell in planned]):
        return True
    tried = _results(study, [(t.arm, f"tuning {t.arm.name}, {t.point.label}", t.cell) for t in trials], settings)
    choices = tuning.choose(study, trials, tried)
    study = tuning.reported(study, choices)
    planned = planned or list(_cells(study, settings, extra))
    results = _results(study, [(arm, f"{arm.name}, seed {seed}", cell) for arm, seed, cell in planned], settings)
    found = {arm.name: tuning.untuned(arm, range(settings.seeds)) for arm in study.arms}
    for arm, seed, cell in planned:
        found[arm.name][seed] = results[cell]
    target = _target([*results, *tried])
    arms = [ArmResults(arm, found[arm.name], target) for arm in study.arms]
    lines = tuning.lines(choices)
    for path in write(pathlib.Path(settings.results or settings.out), study, arms, settings.seeds, extra, lines):
        _say(str(path))
    return all(len(each.finished) == len(each.by_seed) for each in arms if settings.takes(each.arm))


def _announce(study: Study, settings: Settings, runs: Sequence[tuple[Arm, Cell]]) -> bool:
    """Says what a study will cost or, for a dry run, its commands; returns whether that is all that was asked for."""
    cells = [cell for arm, cell in runs if settings.takes(arm)]
    later = settings.seeds * sum(bool(arm.points) for arm in study.arms if settings.takes(arm))
    if settings.dry_run:
        for cell in cells:
            print(shlex.join(running.command(cell, settings.launcher)))
        if later:
            print(f"# then the best point of each arm with seeds 0 to {settings.seeds - 1}: {later} runs")
    elif cells and not settings.render:
        _say(f"{study.name}: {cost.line(cells, settings.images_per_second, later)}")
    return settings.dry_run


def _results(study: Study, runs: Sequence[tuple[Arm, str, Cell]], settings: Settings) -> dict[Cell, trial_runs.Result]:
    """The results of cells; those of arms that were asked for are run if need be, and told as they end.

    Args:
      study: whose cells they are.
      runs: the arm of each, and what to call it.
      settings: of the program.
    """
    names = {cell: name for arm, name, cell in runs if settings.takes(arm)}
    cells = list(names)
    found = {cell: trial_runs.read(cell) for _, _, cell in runs if cell not in names}
    if settings.render:
        ended = (jobs.Ended(number, trial_runs.read(cell), False) for number, cell in enumerate(cells))
    else:
        ended = jobs.ended(cells, settings.launcher, settings.jobs)
    with contextlib.closing(ended):
        for count, end in enumerate(ended, 1):
            cell = cells[end.number]
            found[cell] = end.result
            _say(f"{study.name} {count}/{len(cells)} {names[cell]}: {_line(end.result, end.ran)}")
    return found


def _cells(study: Study, settings: Settings, extra: tuple[str, ...]) -> Iterator[tuple[Arm, int, Cell]]:
    """Seed by seed, so that a study that was cut short has all arms that are tuned."""
    out = pathlib.Path(settings.out).absolute()
    for seed in range(settings.seeds):
        for arm in study.arms:
            if arm.points:
                continue
            yield arm, seed, trial_runs.create(out, study.arguments(arm, seed, extra), settings.ranks)


def _target(cells: Sequence[Cell]) -> float:
    """The first --target of the runs."""
    targets = configuration.resolve(cells[0].flags).target or (TARGET,)
    return targets[0]


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
    tuning: Sequence[str] = (),
) -> list[pathlib.Path]:
    """Writes the study's CSV, Markdown and, with matplotlib, PNG; returns their paths.

    Raises:
      UserError: if they cannot be written.
    """
    drawn = plot.available()
    paths = [directory / f"{study.name}.csv", directory / f"{study.name}.md"]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(tables.to_csv(study, arms, extra), encoding="utf-8")
        paths[1].write_text(tables.to_markdown(study, arms, seeds, extra, drawn, tuning), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--results={directory}: {error.strerror}; give a directory that can be written") from None
    if drawn:
        paths.append(directory / f"{study.name}.png")
        plot.draw(paths[-1], study, arms)
    else:
        print("no PNG: matplotlib is not installed; pip install matplotlib", file=sys.stderr)
    return paths
