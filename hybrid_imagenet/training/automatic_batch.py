"""Finds, for --per_gpu_batch=auto, the largest batch that fits the memory of every rank's device (Lu et al. §2.2.3)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.config import AUTO, Config
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.numerics import largest_batch
from hybrid_imagenet.training import hardware

_LAUNCHER = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HOROVOD_", "SLURM_", "TF_CONFIG")
_SHARE = 0.8  # of a host's free memory, if no limit is given; the rest is for input and what else runs


def settle(
    config: Config,
    communicator: Communicator,
    precision: str,
    classes: int,
    examples: int,
    earlier: Mapping[str, Any],
) -> tuple[Config, str]:
    """Puts a number in place of `auto`, the same on all ranks: the least that any of them found.

    Each rank with a GPU tries batches on it, in a process of its own; on CPUs one rank of each host does. A resumed run
    takes the number that it was started with.

    Args:
      config: the configuration.
      communicator: the ranks, all of which call this.
      precision: the compute type.
      classes: of the data set.
      examples: training images; a batch of all ranks needs no more.
      earlier: config.json of the run that is resumed, or nothing.

    Returns:
      The configuration with a number, and a line for the log (empty if a number was given).

    Raises:
      UserError: on all ranks, if not even one image fits.
    """
    if config.per_gpu_batch != AUTO:
        return config, ""
    before = _before(earlier)
    if before:
        return _with(config, before), f"--per_gpu_batch=auto: {before} images, as before"
    error: UserError | None = None
    found, note = None, ""
    if hardware.has_gpu() or communicator.local_rank == 0:
        try:
            found, note = _find(config, communicator, precision, classes, examples)
        except UserError as problem:
            error = problem
    communicator.agree(error)
    batches = [batch for batch in communicator.allgather_object(found) if batch is not None]
    return _with(config, min(batches)), f"--per_gpu_batch=auto: {min(batches)} images{note}"


def _with(config: Config, batch: int) -> Config:
    """The configuration with a batch. Ranks are connected by now, so that no table can group them for normalization."""
    fixed = {"bn_group": "--per_gpu_batch=auto"} if config.origins.get("bn_group", "default") == "default" else {}
    return config.replace(fixed, per_gpu_batch=batch)


def _find(config: Config, communicator: Communicator, precision: str, classes: int, examples: int) -> tuple[int, str]:
    most = max(1, examples // (communicator.size * config.gradient_accumulation_steps))
    limit = config.memory_limit_gb * 1e9 if config.memory_limit_gb else _free_memory(communicator.local_size)
    with _Trials(config, communicator, precision, classes) as trials:
        batch, peaks = largest_batch.search(trials.measure, limit, most)
    tried = ", ".join(f"{b}: {'too much' if p is None else f'{p / 1e9:.2f} GB'}" for b, p in sorted(peaks.items()))
    if not batch:
        raise UserError(
            f"--per_gpu_batch=auto: not even one image fits within {limit / 1e9:.3g} GB (tried {tried}); raise "
            "--memory_limit_gb, or choose a smaller --model or --image_size"
        )
    bound = "the device's memory" if limit == float("inf") else f"{limit / 1e9:.3g} GB"
    return batch, f" within {bound} (tried {tried})"


def _free_memory(ranks: int) -> float:
    """Returns bytes for each rank of this host; on a GPU all that there is, which shows when a step fails."""
    if hardware.has_gpu():
        return float("inf")
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    free = next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    group = pathlib.Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # there may be no such group, or no limit
        free = min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return _SHARE * free / ranks


def _before(earlier: Mapping[str, Any]) -> int | None:
    """Returns the number in the configuration of the run that is to be resumed."""
    try:
        return int(earlier["flags"]["per_gpu_batch"]) or None
    except (ValueError, KeyError, TypeError):
        return None


class _Trials:
    """Tries batches in a process of its own, and starts a new one if that ends because memory ran out."""

    def __init__(self, config: Config, communicator: Communicator, precision: str, classes: int):
        self._request = {
            "settings": json.loads(dataclasses.replace(config, per_gpu_batch=1).to_json()),
            "classes": classes,
            "precision": precision,
            "alone": communicator.size == 1,
        }
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER)}
        if hardware.has_gpu():
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            place = communicator.local_rank
            self._environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[place] if visible else str(place)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the trials
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> _Trials:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._errors.close()

    def measure(self, batch: int) -> float | None:
        """Returns the peak memory in bytes of a step with this batch; None if there was not enough.

        Raises:
          UserError: if the trial failed for another reason.
        """
        answer = ""
        try:
            if self._process is None:
                self._process = self._start()
            answer = self._ask(self._process, str(batch))
        except BrokenPipeError:
            pass  # it has ended, as a missing answer tells too
        if not answer:
            self._ended()
            return None
        peak: float | None = json.loads(answer)
        return peak

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "hybrid_imagenet.training.batch_trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=self._environment,
            start_new_session=True,  # a Ctrl-C on the terminal is for the run, with which its input ends
        )
        self._process = process
        self._ask(process, json.dumps(self._request))
        return process

    @staticmethod
    def _ask(process: subprocess.Popen[str], line: str) -> str:
        """Writes a line and returns the one that answers it; empty if the process has ended."""
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the process of the trials has no pipes")
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
        return process.stdout.readline()

    def _ended(self) -> None:
        """Takes the end of the process for a lack of memory if it was killed or aborted, else for a mistake."""
        if self._process is None:
            return
        self._process.communicate()
        code, self._process = self._process.returncode, None
        if code in (-signal.SIGKILL, -signal.SIGABRT):
            return
        self._errors.seek(0)
        lines = [line for line in self._errors.read().splitlines() if line.strip()] or [f"exit code {code}"]
        raise UserError(f"--per_gpu_batch=auto: the trial failed ({lines[-1].strip()}); give a number")
