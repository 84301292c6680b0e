"""prune_fatbins.py CAPABILITY LIBRARY...: takes the code for other GPUs out of shared libraries, in
place.

A library holds containers of GPU code ("fatbins") in sections of their own, each with an entry for
each kind of GPU. Here a container keeps the entries for one GPU, or where it has none, PTX that the
driver can compile for it. What they leave are zeros behind the container's end, so that nothing
else of the library moves; they compress to nothing. The form is that of nv_fatbin files of CUDA 11
to 13, as cuobjdump lists them:

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

_MAGIC = struct.pack("<I", 0xBA55ED50)
_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQ")
_SIZE_AT, _CAPABILITY_AT = 8, 28
Entry = tuple[int, int, int, int]  # kind, capability, first byte and end
_PTX, _MACHINE_CODE = 1, 2
_SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")


def prune(library: Path, capability: int) -> int:
    """Takes entries out of the containers of a library; returns their bytes, which become zeros.

    Raises:
      ValueError: if a container has another form.
    """
    removed = 0
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for start, end in _sections(data):
            place = data.find(_MAGIC, start, end)
            while place >= 0:
                _, _, header, size = _CONTAINER.unpack_from(data, place)
                first, behind = place + header, place + header + size
                kept = b"".join(
                    data[a:b] for a, b in _kept(list(_entries(data, first, behind)), capability)
                )
                data[first:behind] = kept.ljust(size, b"\0")
                struct.pack_into("<Q", data, place + _SIZE_AT, len(kept))
                removed += size - len(kept)
                place = data.find(_MAGIC, behind, end)
    return removed


def _kept(entries: list[Entry], capability: int) -> list[tuple[int, int]]:
    """First byte and end of the entries for a GPU, else of those that it can compile, else of the
    smallest one.
    """
    ready = [(a, b) for kind, code, a, b in entries if _runs(kind, code, capability)]
    compiled = [(a, b) for kind, code, a, b in entries if kind == _PTX and code <= capability]
    return (
        ready
        or compiled
        or sorted(((a, b) for _, _, a, b in entries), key=lambda span: span[1] - span[0])[:1]
    )


def _runs(kind: int, code: int, capability: int) -> bool:
    """Whether an entry is machine code that a GPU runs: of its generation, and not of a later
    member.
    """
    return kind == _MACHINE_CODE and code // 10 == capability // 10 and code <= capability


def _entries(data: mmap.mmap, place: int, end: int) -> Iterator[Entry]:
    """The entries of a container."""
    while place < end:
        kind, _, header, length = _ENTRY.unpack_from(data, place)
        if (
            kind not in (_PTX, _MACHINE_CODE)
            or header <= _CAPABILITY_AT
            or place + header + length > end
        ):
            raise ValueError(f"byte {place}: not an entry of GPU code")
        (code,) = struct.unpack_from("<I", data, place + _CAPABILITY_AT)
        yield kind, code, place, place + header + length
        place += header + length


def _sections(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """First byte and end of the sections of GPU code in a 64-bit ELF file."""
    if data[:5] != b"\x7fELF\x02":
        return
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    headers = [
        struct.unpack_from("<IIQQQQ", data, table + number * size) for number in range(count)
    ]
    for name, kind, _, _, place, length in headers:
        first = headers[names][4] + name
        if data[first : data.find(b"\0", first)] in _SECTIONS and kind == 1:
            yield place, place + length


def main() -> int:
    """Prunes the libraries that the command line names."""
    for word in sys.argv[2:]:
        try:
            removed = prune(Path(word), int(sys.argv[1]))
        except ValueError as error:
            print(f"error: {word}: {error}", file=sys.stderr)
            return 1
        if removed:
            print(
                f"{Path(word).name}: {removed / 2**20:.0f} MiB of code for other GPUs",
                file=sys.stderr,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
