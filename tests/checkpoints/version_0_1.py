"""Writes run directories as version 0.1 did, byte by byte, without the package.

A checkpoint of version 0.1 is an uncompressed ZIP archive (PKWARE's APPNOTE: local headers, central directory, end
record) of arrays in NumPy's format 1.0 (NEP 1): `meta.npy`, the bytes of a JSON object, and `array/<name>.npy`. The
object has `format` 1, the sorted names as `arrays`, and the description of the run. `version_0_1.json` holds what such
a run of ResNet-10 on the digits stored, except the values of its arrays: names, shapes and types in order, the
description, config.json and metrics.jsonl.
"""

from __future__ import annotations

import json
import pathlib
import struct
import zlib

import numpy as np

STORED = json.loads(pathlib.Path(__file__).with_suffix(".json").read_text())
STEP = STORED["meta"]["state"]["step"]


def npy(shape: list[int], dtype: str, content: bytes) -> bytes:
    """An array file: magic, version 1.0, length of the header, the header padded to 64 bytes, the values."""
    described = "({})".format(", ".join(map(str, shape)) + ("," if len(shape) == 1 else ""))
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {described}, }}"
    header += " " * (-(10 + len(header) + 1) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode("latin1") + content


def archive(members: dict[str, bytes]) -> bytes:
    """A ZIP archive whose members are stored as they are."""
    local, central = b"", b""
    for name, content in members.items():
        sizes = struct.pack("<III", zlib.crc32(content), len(content), len(content))
        fixed = struct.pack("<HHHHH", 20, 0, 0, 0, 0x21) + sizes + struct.pack("<HH", len(name), 0)
        central += b"PK\x01\x02" + struct.pack("<H", 20) + fixed + struct.pack("<HHHII", 0, 0, 0, 0, len(local))
        central += name.encode()
        local += b"PK\x03\x04" + fixed + name.encode() + content
    count = len(members)
    return local + central + b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, count, count, len(central), len(local), 0)


def values() -> dict[str, np.ndarray]:
    """Made-up arrays under the names of the stored run: small weights, positive variances and scales."""
    generator = np.random.default_rng(1)
    made = {}
    for name, shape, dtype in STORED["arrays"]:
        numbers = 0.05 * generator.standard_normal(shape)
        if name.endswith(("variance", "gamma")) or "/v/" in name:
            numbers = 1.0 + np.abs(numbers)
        if not name.startswith("model/"):
            numbers = np.zeros(shape)
        made[name] = np.asarray(numbers).astype(dtype)
    for name, number in STORED["scalars"].items():
        made[name] = np.full(made[name].shape, number, made[name].dtype)
    return made


def checkpoint(arrays: dict[str, np.ndarray], meta: dict) -> bytes:
    """The bytes of a checkpoint."""
    text = json.dumps({"format": 1, "arrays": sorted(arrays), **meta}).encode()
    members = {"meta.npy": npy([len(text)], "|u1", text)}
    for name, array in arrays.items():
        members[f"array/{name}.npy"] = npy(list(array.shape), array.dtype.str, array.tobytes())
    return archive(members)


def write_run(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Writes the directory of the run; returns the arrays of its checkpoint."""
    arrays = values()
    (path / "checkpoints").mkdir(parents=True)
    (path / "lock").touch()
    (path / "checkpoints" / f"step-{STEP:09d}.npz").write_bytes(checkpoint(arrays, STORED["meta"]))
    (path / "config.json").write_text(json.dumps(STORED["config"], indent=2, sort_keys=True) + "\n")
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in STORED["records"]))
    return arrays
