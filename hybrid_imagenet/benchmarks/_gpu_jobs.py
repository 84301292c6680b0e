"""Starts the jobs of `bench gpu` and reads their results."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hybrid_imagenet import config as configuration
from hybrid_imagenet.benchmarks._gpu_rank import MARK
from hybrid_imagenet.comm import nccl_log
from hybrid_imagenet.errors import UserError, counted

_RANK = "hybrid_imagenet.benchmarks._gpu_rank"
# NVML's clocks event reasons; 0x1 (idle), 0x2 (set clocks) and 0x4 (power cap, usual under load) are no fault.
_SLOWED = {0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat, by the hardware", 0x80: "power brake"}
_SAMPLE = ("nvidia-smi", "--query-gpu=clocks_throttle_reasons.active", "--format=csv,noheader", "-l", "1")


def measure(ranks: int, hosts: str, profiled: int, flags: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Runs a job and returns what its rank 0 measured, with `slowed` and, from several ranks, `transport`.

    Raises:
      UserError: if it fails or takes longer than --timeout.
    """
    command = _job(ranks, hosts, profiled, flags, options)
    environment = os.environ | {"NCCL_DEBUG": "INFO"}
    with _clocks() as samples:
        said = _output(command, environment, options.timeout, ranks)
        seen = samples()
    row = result(said)
    row["slowed"] = slowed(seen)
    if ranks > 1:
        row["transport"] = str(nccl_log.read(said))
    return row


def _job(ranks: int, hosts: str, profiled: int, flags: Sequence[str], options: argparse.Namespace) -> list[str]:
    """The command of a job; one rank on this host needs no launcher."""
    program = [f"--{name}={getattr(options, name)}" for name in ("steps", "rounds", "classes")]
    program += [f"--profiled={profiled}", "--", *flags]
    if ranks > 1 or not hosts.startswith("localhost:"):
        launch = [sys.executable, "-m", "hybrid_imagenet", "run", "-np", str(ranks), "-H", hosts]
        launch += [f"--ssh_port={options.ssh_port}"] if options.ssh_port else []
        launch += [f"--network_interfaces={options.interface}"] if options.interface else []
        return [*launch, "--module", _RANK, "--", *program]
    return [sys.executable, "-m", _RANK, *program]


def _output(command: Sequence[str], environment: dict[str, str], seconds: float, ranks: int) -> str:
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # a launcher ends its ranks
        process.communicate()
        raise UserError(f"the job of {counted(ranks, 'rank')} took more than --timeout={seconds:g} s") from None
    if process.returncode or MARK not in said:
        raise UserError(f"the job of {counted(ranks, 'rank')} failed (exit code {process.returncode}): {reason(said)}")
    return said


def reason(said: str) -> str:
    """The lines of a failed job that tell most: its errors, else its last ones; in one line."""
    lines = [line.strip() for line in said.splitlines() if line.strip() and "NCCL INFO" not in line]
    errors = [line for line in lines if "error:" in line.lower() or "Error" in line or "NCCL WARN" in line]
    return " | ".join((errors or lines)[-3:])[:600] or "it said nothing"


def result(said: str) -> dict[str, Any]:
    """The result in a job's output; launchers may put words around it."""
    row: dict[str, Any] = json.JSONDecoder().raw_decode(said.partition(MARK)[2])[0]
    return row


@contextlib.contextmanager
def _clocks() -> Iterator[Callable[[], str]]:
    """Has nvidia-smi write every second what slows clocks down; yields a function that returns the lines."""
    with tempfile.TemporaryFile("w+") as lines:
        try:
            process = subprocess.Popen(_SAMPLE, stdout=lines, stderr=subprocess.DEVNULL)
        except OSError:
            process = None
        try:
            yield lambda: Path(f"/proc/self/fd/{lines.fileno()}").read_text()
        finally:
            if process is not None:
                process.terminate()
                process.wait()


def slowed(samples: str) -> str:
    """What slowed clocks down while a job ran, from nvidia-smi's bits; empty for nothing."""
    bits = 0
    for line in samples.split():
        with contextlib.suppress(ValueError):
            bits |= int(line, 16)
    return ", ".join(text for bit, text in _SLOWED.items() if bits & bit)


def input_rate(flags: Sequence[str]) -> float:
    """Images per second that this host reads and decodes with all its cores: of --dataset, or of made photographs.

    Raises:
      UserError: if the benchmark of input fails.
    """
    config = configuration.resolve(flags)
    command = [sys.executable, "-m", "hybrid_imagenet.benchmarks", "input", "--seconds=5"]
    if not config.dataset.startswith("synthetic"):
        command += [f"--source={config.dataset}", f"--data_dir={config.data_dir}"]
        command += [f"--data_cache_dir={config.data_cache_dir}"] if config.data_cache_dir else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "input.json"
        size = f"--image_size={config.image_size}"
        done = subprocess.run([*command, size, f"--json={path}"], capture_output=True, text=True, timeout=900)
        if done.returncode:
            raise UserError(f"the benchmark of input failed: {reason(done.stderr)}")
        rows = json.loads(path.read_text())["rows"]
    shards = [row for row in rows if row["name"].endswith(": shards")] or rows
    return float(shards[0]["images_per_second"])
