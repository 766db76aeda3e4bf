"""System shared memory that clients register: named regions of POSIX shared memory objects.

A region is a file under /dev/shm. It is read and written with `pread` and `pwrite` and never mapped: a client may
shorten its file at any time, and touching a mapped page beyond the end would kill the server. Off by default, because
clients can then read and write memory of the machine. Used on the event loop; only `find` may be called from other
threads.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from convoy.models.errors import InvalidRequest, NotFound, Unsupported

_FOLDER = Path("/dev/shm")
# A single name below the folder, with or without POSIX's leading slash.
_KEY = re.compile(r"/?(?!\.{1,2}$)[^/\0]{1,250}")
_RESERVED_PREFIX = "triton_python_backend_shm_region_"
_MOST_REGIONS = 1024  # each holds an open file
_MAX_BYTES = 1 << 62


@dataclass(slots=True, eq=False)
class Region:
    """`byte_size` bytes from `offset` of the object `key`.

    Unregistering a region in use only marks it; it is closed when the last request releases it.
    """

    name: str
    key: str
    offset: int
    byte_size: int
    _file: int = field(repr=False)
    _users: int = 0
    _is_leaving: bool = False

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill the view from `offset` within the region. Raises InvalidRequest."""
        done = 0
        while done < len(view):
            count = os.preadv(self._file, [view[done:]], self.offset + offset + done)
            if count == 0:
                raise self._is_shorter()
            done += count

    def write(self, data: memoryview, offset: int) -> None:
        """Write the data at `offset` within the region. Raises InvalidRequest."""
        # Writing beyond the end would make the object larger than its owner made it.
        if self.offset + offset + len(data) > os.fstat(self._file).st_size:
            raise self._is_shorter()
        done = 0
        while done < len(data):
            done += os.pwritev(self._file, [data[done:]], self.offset + offset + done)

    def _is_shorter(self) -> InvalidRequest:
        return InvalidRequest(
            f"shared memory region '{self.name}' is smaller than when it was registered; register it again"
        )


class SharedMemory:
    """The regions of one server, by name."""

    def __init__(self, *, is_allowed: bool) -> None:
        self.is_allowed = is_allowed
        self._regions: dict[str, Region] = {}

    def check_allowed(self) -> None:
        """Raise Unsupported unless the operator allows shared memory."""
        if not self.is_allowed:
            raise Unsupported(
                "Client shared memory is disabled. Start the server with '--allow-shared-memory' to enable."
            )

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open a shared memory object under a name. Raises InvalidRequest or Unsupported."""
        self.check_allowed()
        if name in self._regions:
            raise InvalidRequest(f"shared memory region '{name[:100]}' already in manager; unregister it first")
        if len(self._regions) >= _MOST_REGIONS:
            raise InvalidRequest(f"{_MOST_REGIONS} shared memory regions are registered; unregister some first")
        file = _open(name, key)
        try:
            _check_bounds(name, offset, byte_size, os.fstat(file).st_size)
        except InvalidRequest:
            os.close(file)
            raise
        self._regions[name] = Region(name, key, offset, byte_size, file)

    def unregister(self, name: str | None) -> None:
        """Unregister a region, or all regions. Unknown names are ignored. Raises Unsupported."""
        self.check_allowed()
        for region in self._chosen(name):
            region._is_leaving = True
            self._settle(region)

    def status(self, name: str | None) -> list[Region]:
        """Describe one region or all. Raises NotFound or Unsupported."""
        self.check_allowed()
        if name is not None and name not in self._regions:
            raise NotFound(f"Unable to find system shared memory region: '{name[:100]}'; register it first")
        return self._chosen(name)

    def find(self, name: str) -> Region:
        """The region for a request's tensor. Raises NotFound or Unsupported."""
        self.check_allowed()
        region = self._regions.get(name)
        if region is None or region._is_leaving:
            raise NotFound(f"Unable to find shared memory region: '{name[:100]}'; register it first")
        return region

    def hold(self, region: Region) -> None:
        """Hold a region until `release`. Raises NotFound if it was just unregistered."""
        if self._regions.get(region.name) is not region:
            raise NotFound(f"Unable to find shared memory region: '{region.name[:100]}'; register it first")
        region._users += 1

    def release(self, region: Region) -> None:
        region._users -= 1
        self._settle(region)

    def _chosen(self, name: str | None) -> list[Region]:
        return [region for region in self._regions.values() if name in (None, region.name)]

    def _settle(self, region: Region) -> None:
        if region._is_leaving and not region._users and self._regions.get(region.name) is region:
            del self._regions[region.name]
            os.close(region._file)


def _open(name: str, key: str) -> int:
    plain = key.removeprefix("/")
    if not _KEY.fullmatch(key) or plain.startswith(_RESERVED_PREFIX):
        raise InvalidRequest(
            f"failed to register shared memory region '{name[:100]}': the key must name a shared memory "
            f"object such as '/input', and not begin with {_RESERVED_PREFIX}"
        )
    try:
        # Refuse links, which lead out of the folder, and pipes and devices, which may block.
        file = os.open(_FOLDER / plain, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "invalid name"
        raise InvalidRequest(f"Unable to open shared memory region: '{key[:100]}' ({why})") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise InvalidRequest(f"Unable to open shared memory region: '{key[:100]}' (it is not shared memory)")
    return file


def _check_bounds(name: str, offset: int, byte_size: int, available: int) -> None:
    if not 0 <= offset < _MAX_BYTES or offset > available:
        raise InvalidRequest(
            f"Invalid offset for shared memory region: '{name[:100]}'; it is {offset}, the object has {available} bytes"
        )
    if not 0 < byte_size < _MAX_BYTES or offset + byte_size > available:
        raise InvalidRequest(
            f"Invalid offset + byte size for shared memory region: '{name[:100]}'; "
            f"they are {offset} + {byte_size}, the object has {available} bytes"
        )
