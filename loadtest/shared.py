"""Memory that several processes see and that leaves nothing behind.

Knows anonymous files: they have no name, so whatever ends a process, SIGKILL included, nothing is left to
clean up. Knows nothing of what lies in them.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from array import array
from collections.abc import Sequence

OFFSET_BYTES = 8


def anonymous(size_bytes: int) -> int:
    """A file descriptor of so many zero bytes; pages cost memory once they are written. The caller closes it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("convoy-loadtest")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, max(size_bytes, 1))
    return descriptor


def write_blobs(blobs: Sequence[bytes]) -> int:
    """A descriptor of a new file with the blobs behind the table of where each begins and the last ends."""
    table = array("q", [OFFSET_BYTES * (len(blobs) + 1)])
    for blob in blobs:
        table.append(table[-1] + len(blob))
    descriptor = anonymous(0)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(table.tobytes())
        file.writelines(blobs)
    return descriptor


def read_blobs(descriptor: int, count: int) -> list[bytes]:
    """The blobs that `write_blobs` wrote."""
    with mmap.mmap(descriptor, 0) as memory:
        table = array("q", memory[: OFFSET_BYTES * (count + 1)])
        return [memory[table[index] : table[index + 1]] for index in range(count)]
