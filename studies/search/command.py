"""`python -m studies.search --budget_epochs=N -- FLAGS`: finds the size of steps and T with short trainings."""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
import shlex
from collections.abc import Callable, Sequence

from hybrid_imagenet import config as configuration
from hybrid_imagenet.errors import EXIT_OK, UserError, without_secrets
from hybrid_imagenet.tools import command_line
from studies import running, trial_runs
from studies.search import halving, trials
from studies.search.trials import Candidate

Train = Callable[[Candidate, int], trial_runs.Result]


@dataclasses.dataclass(frozen=True)
class Trial:
    """A candidate after a round: validation top-1 (a fraction) and loss (nats); None where it did not finish."""

    candidate: Candidate
    epochs: int
    top1: float | None
    loss: float | None
    reason: str = ""

    @property
    def merit(self) -> tuple[float, float]:
        """The key by which trials are ranked: top-1, then the lower loss; a trial that did not finish is last."""
        return (-1.0, -math.inf) if self.top1 is None or self.loss is None else (self.top1, -self.loss)


def _parser() -> command_line.Parser:
    parser = command_line.Parser(
        prog="python -m studies.search",
        description="Successive halving over --warmup_epochs and the relative step of LARS or LAMB, or --lr where "
        "neither runs: all candidates are trained for a few epochs, the better half for twice as many, and so on. "
        "Flags of the run follow after --.",
    )
    parser.add_argument(
        "--budget_epochs", type=command_line.positive, required=True, help="epochs of all trials together"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("chosen.flags"), help="flag file (%(default)s)"
    )
    parser.add_argument("--ranks", type=command_line.positive, default=1, help="ranks of each trial (%(default)s)")
    parser.add_argument(
        "--relative_steps",
        type=_numbers,
        default=(),
        help="relative steps to try (default: 1/4, 1/2, 1, 2, 4 times the known one of LARS or LAMB at the batch)",
    )
    parser.add_argument(
        "--lrs", type=_numbers, default=(), help="without LARS: rates to try (default: 1/4, 1/2, 1, 2, 4 of --lr)"
    )
    parser.add_argument(
        "--warmups", type=_numbers, default=(), help="T to try, in epochs of the run (default: 1/2, 1, 3/2)"
    )
    parser.add_argument("--launcher", choices=running.LAUNCHERS, default="mpirun", help="starts ranks (%(default)s)")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="of the run, after --")
    return parser


def _numbers(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 <= value < math.inf for value in values):
        raise argparse.ArgumentTypeError(f"{text}: give numbers, separated by commas")
    return values


def search(found: Sequence[Candidate], budget: int, train: Train, report: Callable[[str], None]) -> list[Trial]:
    """Tries the candidates in rounds.

    Args:
      found: the candidates.
      budget: epochs of all trials together.
      train: trains a candidate for some epochs.
      report: is told of each trial.

    Returns:
      All trials in the order in which they were made; the best of those with the most epochs is the choice.

    Raises:
      UserError: for too few candidates or epochs, or if no trial of a round finishes.
    """
    try:
        rounds = halving.rungs(len(found), budget)
    except ValueError as error:
        raise UserError(f"--budget_epochs={budget}: {error}") from None
    done: list[Trial] = []
    left = list(found)
    for number, rung in enumerate(rounds, 1):
        here = []
        for candidate in left[: rung.candidates]:
            here.append(_trial(candidate, rung.epochs, train(candidate, rung.epochs)))
            report(f"round {number}/{len(rounds)}, {_line(here[-1])}")
        done += here
        here.sort(key=lambda trial: trial.merit, reverse=True)  # stable: among equals the first given
        left = [trial.candidate for trial in here if trial.top1 is not None]
        if not left:
            raise UserError(
                f"no trial of round {number} finished ({here[0].reason}): try smaller steps or longer --warmups"
            )
    return done


def choice(done: Sequence[Trial]) -> Trial:
    """The best trial of the last round."""
    longest = max(trial.epochs for trial in done)
    return max((trial for trial in done if trial.epochs == longest), key=lambda trial: trial.merit)


def _trial(candidate: Candidate, epochs: int, result: trial_runs.Result) -> Trial:
    if result.status != trial_runs.FINISHED:
        return Trial(candidate, epochs, None, None, result.reason or result.status)
    return Trial(candidate, epochs, result.summary["val_top1"], result.summary["val_loss"])


def _line(trial: Trial) -> str:
    tried = trial.candidate
    text = f"{tried.flag} {tried.value:.4g}, T {tried.warmup_epochs:g}, {trial.epochs} epochs: "
    if tried.relative_step is not None:
        text = f"relative step {tried.relative_step:.3g}, {text}"
    if trial.top1 is None:
        return text + trial.reason
    return text + f"top-1 {100 * trial.top1:.2f} %, loss {trial.loss:.4f}"


def flagfile(done: Sequence[Trial], command: str) -> str:
    """The flag file: what was tried as comments, the chosen values as flags."""
    best = choice(done).candidate
    what = "Learning rate" if best.relative_step is None else "Relative step"
    lines = [f"# {what} and T by successive halving", f"# Command: {command}", "#"]
    lines += [f"# {_line(trial)}" for trial in done]
    return "\n".join([*lines, f"--{best.flag}={best.value!r}", f"--warmup_epochs={best.warmup_epochs!r}", ""])


def _run(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    config = configuration.resolve(arguments.flags, arguments.ranks)
    lists = arguments.lrs, arguments.relative_steps, arguments.warmups
    found = trials.candidates(config, *lists)
    root = arguments.out.with_suffix(".trials")

    def train(candidate: Candidate, epochs: int) -> trial_runs.Result:
        flags = trials.flags(config, candidate, epochs)
        cell = trial_runs.create(root, [*arguments.flags, *flags], arguments.ranks)
        return running.ensure(cell, running.run_process, arguments.launcher)[0]

    done = search(found, arguments.budget_epochs, train, lambda text: print(text, flush=True))
    text = flagfile(done, without_secrets(f"python -m studies.search {shlex.join(argv)}"))
    try:
        arguments.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out={arguments.out}: {error.strerror}; give a file that can be written") from None
    best = choice(done)
    print(f"chosen: {_line(best)}; wrote {arguments.out}, for --flagfile={arguments.out} after the flags of the run")
    return EXIT_OK


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit code (see `hybrid_imagenet.errors`)."""
    return running.resumable(lambda: _run(argv))
