"""Says at the end of a run where its results lie and what to do with them."""

from __future__ import annotations

import pathlib
import shlex
from collections.abc import Sequence

from hybrid_imagenet.config import Config
from hybrid_imagenet.data.storage import is_url


def lines(config: Config, run_dir: pathlib.Path, checkpoints: Sequence[pathlib.Path], stop: str) -> list[str]:
    """Returns where checkpoints lie, and the next commands.

    Args:
      config: of the run.
      run_dir: its directory.
      checkpoints: its files, newest first.
      stop: why it ended: "preempted", "target" or "".
    """
    found = [f"results: {run_dir}"]
    if not checkpoints or config.fast_dev_run:
        return found
    found[0] += f", newest checkpoint: {checkpoints[0].relative_to(run_dir)}"
    report = ["hybrid-imagenet", "report", str(run_dir)]
    if stop == "preempted":
        resume = "the command that started it, with --resume"
        if config.run_dir is None:
            resume += f" --run_dir={shlex.quote(str(run_dir))}"
        return [*found, f"next: {resume}", f"next: {shlex.join(report)}"]
    best = ["--best"] if config.keep_best else []
    evaluate = ["hybrid-imagenet", "evaluate", str(run_dir), *best, f"--dataset={config.dataset}"]
    evaluate += [f"--data_dir={config.data_dir}"] if config.data_dir else []
    evaluate += [f"--data_cache_dir={config.data_cache_dir}"] if is_url(config.data_dir or "") else []
    evaluate += [f"--val_fraction={config.val_fraction:g}"] if config.val_fraction else []
    export = ["hybrid-imagenet", "export", str(run_dir), *best, f"--to={run_dir / 'network.onnx'}"]
    if config.max_steps is not None and not stop:
        found.append(f"next: the command that started it, with --resume and without --max_steps={config.max_steps}")
    return [*found, *(f"next: {shlex.join(words)}" for words in (report, evaluate, export))]
