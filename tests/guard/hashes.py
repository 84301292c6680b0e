"""Reads and writes hashes.json: the digest of each guarded run, by kind of processor.

Vector instructions change the order in which sums are taken, so digests hold for one kind of
processor and one version of TensorFlow. To add a kind, check out the commit that added this file
and run there

    python -m tests.guard.record

then copy the lines that it added to tests/guard/hashes.json.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping

PATH = pathlib.Path(__file__).with_name("hashes.json")
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16")
"""Vector instructions by which TensorFlow, oneDNN and XLA choose their kernels."""


def processor() -> str:
    """Names the kind of this machine's processor: its vendor and its vector instructions."""
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
    """The key of this machine's digests in hashes.json."""
    from importlib import metadata

    for package in ("tensorflow-cpu", "tensorflow"):
        try:
            return f"{processor()}, TensorFlow {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    raise ModuleNotFoundError("TensorFlow is not installed")


def load() -> Mapping[str, str]:
    """The digests by run that were recorded for this kind of machine; empty if there are none."""
    return json.loads(PATH.read_text()).get(key(), {}) if PATH.exists() else {}


def save(digests: Mapping[str, str]) -> None:
    """Adds digests for this kind of machine."""
    everything = json.loads(PATH.read_text()) if PATH.exists() else {}
    everything[key()] = {**everything.get(key(), {}), **digests}
    PATH.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")
