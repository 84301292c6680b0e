"""`benchmarks table DIR`: the aims for speed beside what the JSON files of the other benchmarks in DIR hold.

Prints a Markdown table; with --plots=DIR also draws `goals.png` (measured over aim) and `roofline.png`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.tools import command_line

STEP_AIMS = {("mixed_bfloat16", "torch"): 1.25, ("mixed_bfloat16", "keras"): 2.0}
STEP_AIM = 1.4  # for the others, in FP32
SHORT = {"mixed_bfloat16": "BF16", "mixed_float16": "FP16", "float32": "FP32"}
PEERS = {"torch": "PyTorch", "keras": "stock Keras"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured value; without an aim it is only reported."""

    goal: int
    measure: str
    value: float
    unit: str = ""
    least: float | None = None
    most: float | None = None

    @property
    def score(self) -> float | None:
        """Measured over aim, so that 1 and more means that the aim is met; None without an aim."""
        if self.least is not None:
            return self.value / self.least
        return self.most / self.value if self.most is not None else None

    def text(self) -> str:
        """The row in Markdown."""
        aim = ""
        if self.least is not None:
            aim = f"at least {self.least:.3g}{self.unit}"
        elif self.most is not None:
            aim = f"at most {self.most:.3g}{self.unit}"
        met = "" if self.score is None else "yes" if self.score >= 1 else "**no**"
        return f"| {self.goal} | {self.measure} | {aim} | {self.value:.3g}{self.unit} | {met} |"


def main(argv: Sequence[str]) -> int:
    """Prints the table and draws the plots."""
    parser = command_line.Parser("bench table", (__doc__ or "").split("\n")[0])
    parser.add_argument("directory", help="where the benchmarks' --json files are")
    parser.add_argument("--plots", help="directory for PNG files")
    options = parser.parse_args(argv)
    reports = load(Path(options.directory))
    found = sorted(rows(reports), key=lambda row: row.goal)
    print("| goal | measure | aim | measured | met |\n|---|---|---|---|---|")
    print("\n".join(row.text() for row in found))
    if options.plots:
        plot(found, reports, Path(options.plots))
    return 0


def load(directory: Path) -> list[Any]:
    """The reports in a directory, by the names of their files.

    Raises:
      UserError: if there are none, or one is not JSON.
    """
    reports = []
    for path in sorted(directory.glob("*.json")):
        try:
            reports.append(json.loads(path.read_text()))
        except (OSError, ValueError):
            raise UserError(f"benchmarks table: {path}: not a JSON file") from None
    if not reports:
        raise UserError(f"benchmarks table: no *.json in {directory}: give the directory of the benchmarks' results")
    return reports


def rows(reports: Sequence[Any]) -> Iterator[Row]:
    """The rows of all reports."""
    makers = {"step": _step, "loop": _loop, "optimizer": _optimizer, "start": _start}
    for report in reports:
        if isinstance(report, list):
            yield from _scaling(report)
        elif isinstance(report, dict) and report.get("benchmark") in makers:
            yield from makers[report["benchmark"]](report)


def _step(report: dict[str, Any]) -> Iterator[Row]:
    kind = f"{SHORT[report['precision']]} step, batch {report['batch']}, {report['image_size']} px"
    for name, peer in report["peers"].items():
        aim = STEP_AIMS.get((report["precision"], name), STEP_AIM)
        rates = f"{report['images_per_second']:.1f} to {peer['images_per_second']:.1f} images/s"
        yield Row(1, f"{kind}: ours over {PEERS.get(name, name)} ({rates})", peer["ratio"], least=aim)
        share = report["peak_bytes"] / peer["peak_bytes"]
        sizes = f"{report['peak_bytes'] / 2**30:.2f} to {peer['peak_bytes'] / 2**30:.2f} GiB"
        most = 1.0 if name == "keras" else None
        yield Row(6, f"{kind}: peak memory, ours over {PEERS.get(name, name)} ({sizes})", share, most=most)
    for row in report.get("variants", {}).values():
        what = f"{kind}, --recompute with batch {row['batch']}"
        yield Row(6, f"{what}: peak memory over the plain step's", row["memory"])
        yield Row(6, f"{what}: processor time per image over the plain step's", row["cost"])


def _loop(report: dict[str, Any]) -> Iterator[Row]:
    kind = f"{SHORT[report['precision']]} loop, batch {report['batch']}, {report['image_size']} px"
    yield Row(2, f"{kind}: images per second over the bare step's", report["ratio"], least=0.98)
    call = report["dispatch_milliseconds"]
    host = report["host_milliseconds"] + call
    yield Row(2, f"{kind}: host time per step ({call:.2f} ms of it to call the step)", host, " ms", most=1)
    yield Row(2, f"{kind}: share of time waiting for input", 100 * report["data_wait_fraction"], " %")
    validation, checkpoint = report["validation"], report["checkpoint"]
    yield Row(5, f"{kind}: validation over training, per image", validation["share_of_training"], most=1 / 3)
    yield Row(5, f"{kind}: training waits for a checkpoint", checkpoint["blocked_seconds"], " s")
    yield Row(5, f"{kind}: steps while the checkpoint is written", checkpoint["steps_meanwhile"], least=1)


def _optimizer(report: dict[str, Any]) -> Iterator[Row]:
    for name, row in report["contestants"].items():
        if name.startswith(("hybrid", "lars")):
            yield Row(3, f"update of 161 tensors, {name}, over Keras's SGD with momentum", row["ratio"], most=1.3)


def _scaling(report: Sequence[dict[str, Any]]) -> Iterator[Row]:
    ours = [row for row in report if "exposed_seconds" in row]
    for row in ours[1:]:
        kind = f"{SHORT[row['precision']]}, batch {row['batch_per_rank']} per rank, {row['ranks']} ranks"
        ratio = row["images_per_second"] / ours[0]["images_per_second"]
        yield Row(4, f"{kind} over {ours[0]['ranks']} rank on the same cores, images per second", ratio, least=1.0)
        share = 100 * row["exposed_seconds"] / row["step_seconds"]
        yield Row(4, f"{kind}: communication that nothing hides, share of the step", share, " %")
    for peer in report:
        if "ratio" in peer:
            kind = f"{peer['ranks']} {'ranks' if peer['ranks'] > 1 else 'rank'}, {SHORT[ours[0]['precision']]}"
            theirs = f"Horovod with legacy Keras in {SHORT[peer['precision']]}"
            yield Row(4, f"{kind}: ours over {theirs}", peer["ratio"], least=1.5)


def _start(report: dict[str, Any]) -> Iterator[Row]:
    yield Row(5, "--help", report["help_seconds"], " s", most=1)
    yield Row(5, f"first step after launch, `{report['launcher']}`", report["first_step_seconds"], " s", most=25)


def plot(found: Sequence[Row], reports: Sequence[Any], directory: Path) -> None:
    """Draws measured over aim, and the rooflines where there are any."""
    from matplotlib.figure import Figure

    directory.mkdir(parents=True, exist_ok=True)
    aimed = [(row, row.score) for row in found if row.score is not None][::-1]
    figure = Figure(figsize=(9, 0.8 + 0.3 * len(aimed)), layout="constrained")
    axes = figure.subplots()
    scores = [score for _, score in aimed]
    colors = ["tab:green" if score >= 1 else "tab:red" for score in scores]
    names = [f"{row.goal}. {row.measure.partition(' (')[0]}" for row, _ in aimed]
    widest = 3.0  # longer bars are cut; their numbers tell
    bars = axes.barh(names, [min(score, widest) - 1 for score in scores], left=1, color=colors)
    axes.bar_label(bars, [f"{score:.2f}" for score in scores], padding=3, fontsize=7)
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xlabel="measured over aim (1 and more: met)", xlim=(0.4, widest + 0.3))
    axes.tick_params(axis="y", labelsize=7)
    figure.savefig(directory / "goals.png", dpi=90)
    rooflines = [r for r in reports if isinstance(r, dict) and r.get("benchmark") == "roofline"]
    if rooflines:
        _plot_rooflines(rooflines, directory / "roofline.png")


def _plot_rooflines(reports: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, len(reports), sharey=True, squeeze=False)[0]
    for axes, report in zip(panels, reports, strict=True):
        groups = list(report["groups"].items())[::-1]
        places = range(len(groups))
        axes.barh([p - 0.2 for p in places], [g["milliseconds"] for _, g in groups], 0.4, label="measured")
        axes.barh([p + 0.2 for p in places], [g["bound"] for _, g in groups], 0.4, label="bound", color="lightgray")
        axes.set_yticks(list(places), [name for name, _ in groups], fontsize=7)
        title = f"{SHORT[report['precision']]}, batch {report['batch']}, one core: {report['step_milliseconds']:.0f} ms"
        axes.set(xlabel="ms per step", title=title)
    panels[0].legend()
    figure.savefig(path, dpi=90)
