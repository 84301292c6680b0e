"""prune_fatbins.py CAPABILITY LIBRARY...: blanks the GPU code of other GPUs in shared libraries, in place.

A library holds containers of GPU code ("fatbins") in sections of their own, each with an entry for each kind of GPU.
The driver reads the headers of the entries and takes the one for its GPU. Here the headers stay, and the code for other
GPUs becomes zeros, which compress to nothing. Where no entry is for the GPU, PTX that it can compile stays.
The form is that of nv_fatbin files of CUDA 11 to 13, as cuobjdump lists them:

    container: magic 0xBA55ED50 (uint32), version, header bytes (uint16 each), bytes that follow (uint64)
    entry:     kind (uint16; 1 PTX, 2 machine code), version (uint16), header bytes (uint32), code bytes (uint64), ...,
               and at byte 28 the capability (uint32; 90 for 9.0)
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
_CAPABILITY_AT = 28
_PTX, _MACHINE_CODE = 1, 2
_SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")


def prune(library: Path, capability: int) -> int:
    """Blanks code in a library; returns the bytes.

    Raises:
      ValueError: if a container has another form.
    """
    blanked = 0
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for start, end in _sections(data):
            place = data.find(_MAGIC, start, end)
            while place >= 0:
                _, _, header, size = _CONTAINER.unpack_from(data, place)
                entries = list(_entries(data, place + header, place + header + size))
                ready = any(_runs(kind, code, capability) for kind, code, _, _ in entries)
                for kind, code, first, length in entries:
                    compiled = not ready and kind == _PTX and code <= capability
                    if not compiled and not _runs(kind, code, capability):
                        data[first : first + length] = bytes(length)
                        blanked += length
                place = data.find(_MAGIC, place + header + size, end)
    return blanked


def _runs(kind: int, code: int, capability: int) -> bool:
    """Whether an entry is machine code that a GPU runs: of its generation, and not of a later member."""
    return kind == _MACHINE_CODE and code // 10 == capability // 10 and code <= capability


def _entries(data: mmap.mmap, place: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Kind, capability, first byte and bytes of the code of each entry of a container."""
    while place < end:
        kind, _, header, length = _ENTRY.unpack_from(data, place)
        if kind not in (_PTX, _MACHINE_CODE) or header <= _CAPABILITY_AT or place + header + length > end:
            raise ValueError(f"byte {place}: not an entry of GPU code")
        (code,) = struct.unpack_from("<I", data, place + _CAPABILITY_AT)
        yield kind, code, place + header, length
        place += header + length


def _sections(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """First byte and end of the sections of GPU code in a 64-bit ELF file."""
    if data[:5] != b"\x7fELF\x02":
        return
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, table + number * size) for number in range(count)]
    for name, kind, _, _, place, length in headers:
        first = headers[names][4] + name
        if data[first : data.find(b"\0", first)] in _SECTIONS and kind == 1:
            yield place, place + length


def main() -> int:
    """Prunes the libraries that the command line names."""
    for word in sys.argv[2:]:
        try:
            blanked = prune(Path(word), int(sys.argv[1]))
        except ValueError as error:
            print(f"error: {word}: {error}", file=sys.stderr)
            return 1
        if blanked:
            print(f"{Path(word).name}: {blanked / 2**20:.0f} MiB of code for other GPUs", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
