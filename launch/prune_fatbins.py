"""Removes code for other GPUs from shared libraries, in place.

Usage: python launch/prune_fatbins.py CAPABILITY LIBRARY...

A library contains containers of GPU code ("fatbins") in separate sections. A container has an entry
for each kind of GPU. This program keeps the entries for one GPU, or else PTX that the driver can
compile for it. The rest of a container becomes zeros after its end, so that nothing else in the
library moves; zeros take no space when the library is compressed. Containers have the format of
nv_fatbin files of CUDA 11 to 13, as cuobjdump lists them:

    container: magic 0xBA55ED50 (uint32), version, header bytes (uint16 each), bytes that follow
    (uint64)
    entry:     kind (uint16; 1 PTX, 2 machine code), version (uint16), header bytes (uint32), code
               bytes (uint64), ..., and at byte 28 the capability (uint32; 90 for 9.0)
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MAGIC = struct.pack("<I", 0xBA55ED50)
_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQ")
_CONTAINER_SIZE_OFFSET = 8
_CAPABILITY_OFFSET = 28
_PTX = 1
_MACHINE_CODE = 2
_SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")


class Entry(NamedTuple):
    """Code for one kind of GPU: `data[start:end]` of a library."""

    kind: int
    capability: int
    start: int
    end: int


def prune(library: Path, capability: int) -> int:
    """Removes entries from the containers of a library.

    Args:
      library: A shared library.
      capability: Compute capability of the GPU, such as 90 for 9.0.

    Returns:
      The number of bytes that have become zeros.

    Raises:
      ValueError: If a container has another format.
    """
    removed = 0
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for section_start, section_end in _code_sections(data):
            container = data.find(_MAGIC, section_start, section_end)
            while container >= 0:
                _, _, header_size, size = _CONTAINER.unpack_from(data, container)
                start = container + header_size
                end = start + size
                entries = _entries_to_keep(list(_entries(data, start, end)), capability)
                kept = b"".join(data[entry.start : entry.end] for entry in entries)
                data[start:end] = kept.ljust(size, b"\0")
                struct.pack_into("<Q", data, container + _CONTAINER_SIZE_OFFSET, len(kept))
                removed += size - len(kept)
                container = data.find(_MAGIC, end, section_end)
    return removed


def _entries_to_keep(entries: list[Entry], capability: int) -> list[Entry]:
    """Returns the entries that a GPU runs, else those that the driver can compile for it.

    If there are neither, returns the smallest entry, so that the container is not empty.
    """
    runnable = [entry for entry in entries if _runs(entry, capability)]
    if runnable:
        return runnable
    compilable = [e for e in entries if e.kind == _PTX and e.capability <= capability]
    if compilable:
        return compilable
    return sorted(entries, key=lambda entry: entry.end - entry.start)[:1]


def _runs(entry: Entry, capability: int) -> bool:
    """Returns whether a GPU runs an entry: machine code of its generation, not of a later model."""
    is_same_generation = entry.capability // 10 == capability // 10
    return entry.kind == _MACHINE_CODE and is_same_generation and entry.capability <= capability


def _entries(data: mmap.mmap, start: int, end: int) -> Iterator[Entry]:
    """Yields the entries of a container."""
    while start < end:
        kind, _, header_size, code_size = _ENTRY.unpack_from(data, start)
        entry_end = start + header_size + code_size
        is_known = kind in (_PTX, _MACHINE_CODE) and header_size > _CAPABILITY_OFFSET
        if not is_known or entry_end > end:
            raise ValueError(f"byte {start}: not an entry of GPU code")
        (capability,) = struct.unpack_from("<I", data, start + _CAPABILITY_OFFSET)
        yield Entry(kind, capability, start, entry_end)
        start = entry_end


def _code_sections(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Yields start and end of the sections of GPU code in a 64-bit ELF file."""
    if data[:5] != b"\x7fELF\x02":
        return
    (table,) = struct.unpack_from("<Q", data, 40)
    header_size, count, names_index = struct.unpack_from("<HHH", data, 58)
    headers = [
        struct.unpack_from("<IIQQQQ", data, table + index * header_size) for index in range(count)
    ]
    names_start = headers[names_index][4]
    for name_offset, kind, _, _, start, size in headers:
        name_start = names_start + name_offset
        name = data[name_start : data.find(b"\0", name_start)]
        # Kind 1 is a section with contents (SHT_PROGBITS).
        if name in _SECTIONS and kind == 1:
            yield start, start + size


def main() -> int:
    """Prunes the libraries in the command line; returns the exit code."""
    capability = sys.argv[1]
    for path in sys.argv[2:]:
        try:
            removed = prune(Path(path), int(capability))
        except ValueError as error:
            print(f"error: {path}: {error}", file=sys.stderr)
            return 1
        if removed:
            print(
                f"{Path(path).name}: {removed / 2**20:.0f} MiB of code for other GPUs removed",
                file=sys.stderr,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
