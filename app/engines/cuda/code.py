"""Which GPUs a library has code for, read from its file.

A CUDA library has machine code for some compute capabilities, and perhaps PTX, which the driver compiles for later
ones. On any other GPU its first kernel fails. Knows just enough of ELF and NVIDIA's fat binaries to find the list;
needs no GPU and no driver.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_SECTION = b".nv_fatbin"
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes after it
_MAGIC = 0xBA55ED50
_ENTRY = struct.Struct("<HHIQ")  # kind, version, bytes of this header, bytes after it
_ARCHITECTURE_AT = 28  # in an entry's header
_PTX, _MACHINE_CODE = 1, 2


@dataclass(frozen=True, slots=True, order=True)
class Code:
    """Code for one architecture: 90 is compute capability 9.0. `is_ptx` means that the driver compiles it for later
    ones too.
    """

    architecture: int
    is_ptx: bool = False

    def runs_on(self, compute_capability: str) -> bool:
        """Whether it runs on a GPU: machine code runs only on the same generation, from its own capability on."""
        major, minor = map(int, compute_capability.split("."))
        if self.is_ptx:
            return self.architecture <= major * 10 + minor
        return self.architecture // 10 == major and self.architecture % 10 <= minor


def has_code(codes: Iterable[Code], compute_capability: str) -> bool:
    return any(code.runs_on(compute_capability) for code in codes)


def in_words(codes: Iterable[Code]) -> str:
    """A phrase such as "7.5, 8.0 and later ones from 9.0 on"."""
    known = sorted(codes)
    machine = ", ".join(f"{one.architecture // 10}.{one.architecture % 10}" for one in known if not one.is_ptx)
    later = [f"{one.architecture // 10}.{one.architecture % 10}" for one in known if one.is_ptx]
    return f"{machine} and later ones from {later[0]} on" if later else machine


@cache
def codes_of(library: Path) -> frozenset[Code]:
    """The code in the file; empty if it cannot be read or has none. Takes a tenth of a second for a large library."""
    try:
        with library.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return frozenset(_codes(data))
    except (OSError, ValueError, struct.error, IndexError):
        return frozenset()


def _codes(data: mmap.mmap) -> Iterator[Code]:
    start, end = _section(data)
    while start < end:
        magic, _, header_bytes, nbytes = _CONTAINER.unpack_from(data, start)
        if magic != _MAGIC:  # padding
            start = data.find(struct.pack("<I", _MAGIC), start, end)
            if start < 0:
                return
            continue
        entry, start = start + header_bytes, start + header_bytes + nbytes
        while entry < start:
            kind, _, entry_header_bytes, entry_bytes = _ENTRY.unpack_from(data, entry)
            if kind in (_PTX, _MACHINE_CODE):
                (architecture,) = struct.unpack_from("<I", data, entry + _ARCHITECTURE_AT)
                yield Code(architecture, kind == _PTX)
            if not entry_header_bytes:
                raise ValueError("an entry without a header")
            entry += entry_header_bytes + entry_bytes


def _section(data: mmap.mmap) -> tuple[int, int]:
    """The start and end of the fat binaries in a 64-bit ELF file. Raises ValueError."""
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("no 64-bit ELF file")
    (headers,) = struct.unpack_from("<Q", data, 0x28)
    count, names_index = struct.unpack_from("<HH", data, 0x3C)
    sections = [_SECTION_HEADER.unpack_from(data, headers + _SECTION_HEADER.size * index) for index in range(count)]
    names = sections[names_index][4]
    for section in sections:
        name = names + section[0]
        if data[name : name + len(_SECTION) + 1] == _SECTION + b"\0":
            return section[4], section[4] + section[5]
    raise ValueError(f"no section {_SECTION.decode()}")
