"""The device code in a CUDA library's file: which architectures it is for, and the file without all but one of them.

A library for six generations of GPUs is five sixths dead weight on a machine that has one; the dead code becomes
zeros, which pack to nothing, and the file stays loadable. Knows the container that nvcc writes ("fat binary"); knows
nothing of what is in the code.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_MAGIC = struct.pack("<I", 0xBA55ED50)
_HEADER, _ENTRY = struct.Struct("<HHQ"), struct.Struct("<HHIQ")
_PTX, _CUBIN = 1, 2
_KINDS = (_PTX, _CUBIN, 4, 8, 16)
_ARCHITECTURE_AT = 28
_SMALLEST_HEADER, _LARGEST_HEADER = 32, 4096
_MOST_BYTES = 1 << 31


@dataclass(frozen=True, slots=True)
class _Code:
    """One piece: `architecture` is 90 for sm_90."""

    kind: int
    architecture: int
    start: int
    end: int


def architectures(library: bytes | bytearray) -> Mapping[str, int]:
    """How many pieces of machine code ("sm_90") and of PTX ("ptx_90") there are; those of zeros are not there."""
    found: Counter[str] = Counter()
    for code in _pieces(library):
        if any(library[code.start : code.start + 64]):
            found[f"{'sm' if code.kind == _CUBIN else 'ptx'}_{code.architecture}"] += 1
    return dict(sorted(found.items()))


def keep_only(library: bytearray, architecture: int) -> int:
    """Make zeros of all other architectures' machine code, in place; gives how many bytes that were."""
    zeroed = 0
    for code in _pieces(library):
        if code.kind == _CUBIN and code.architecture != architecture:
            library[code.start : code.end] = bytes(code.end - code.start)
            zeroed += code.end - code.start
    return zeroed


def _pieces(library: bytes | bytearray) -> Iterator[_Code]:
    position = library.find(_MAGIC)
    while position >= 0:
        if position + 4 + _HEADER.size <= len(library):
            _, header_bytes, total_bytes = _HEADER.unpack_from(library, position + 4)
            if total_bytes < _MOST_BYTES:  # else the four bytes stand there by chance
                end = min(position + header_bytes + total_bytes, len(library))
                yield from _of_one(library, position + header_bytes, end)
        position = library.find(_MAGIC, position + 4)


def _of_one(library: bytes | bytearray, at: int, end: int) -> Iterator[_Code]:
    while at + 64 <= end:
        kind, _, header_bytes, nbytes = _ENTRY.unpack_from(library, at)
        if kind not in _KINDS or not _SMALLEST_HEADER <= header_bytes <= _LARGEST_HEADER:
            return
        (architecture,) = struct.unpack_from("<I", library, at + _ARCHITECTURE_AT)
        start = at + header_bytes
        yield _Code(kind, architecture, start, min(start + nbytes, end))
        at = start + nbytes
