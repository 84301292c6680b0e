"""Reads and writes hashes.json: the digest of each guarded run, by kind of processor.

Vector instructions change the order in which sums are taken, so digests are valid for one kind of
processor and one version of TensorFlow. To add a kind, check out the last commit that changed
hashes.json, whose digests were right on another kind, and run

    python -m tests.guard.record

If a change of the code changes digests, record them for every kind, or remove the kinds on which
you cannot record them.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping

PATH = pathlib.Path(__file__).with_name("hashes.json")
# TensorFlow, oneDNN and XLA choose their kernels by these vector instructions.
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16")


def processor() -> str:
    """Returns the vendor and the vector instructions of this machine's processor."""
    lines = dict(
        line.split(":", 1)
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        if line.count(":")
    )
    values = {key.strip(): value.strip() for key, value in lines.items()}
    flags = values.get("flags", "").split()
    return " ".join(
        [values.get("vendor_id", "unknown"), *(name for name in _INSTRUCTIONS if name in flags)]
    )


def key() -> str:
    """Returns the key of this machine's digests in hashes.json."""
    from importlib import metadata

    for package in ("tensorflow-cpu", "tensorflow"):
        try:
            return f"{processor()}, TensorFlow {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    raise ModuleNotFoundError("TensorFlow is not installed")


def load() -> Mapping[str, str]:
    """Returns the digests for this kind of machine by run; empty if there are none."""
    return json.loads(PATH.read_text()).get(key(), {}) if PATH.exists() else {}


def save(digests: Mapping[str, str]) -> None:
    """Adds digests for this kind of machine."""
    everything = json.loads(PATH.read_text()) if PATH.exists() else {}
    everything[key()] = {**everything.get(key(), {}), **digests}
    PATH.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")
