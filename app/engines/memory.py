"""How large a batch may be: what it needs, compared with the memory that is available.

Sizes come from outside: from a request to load, a configuration, a manifest, a graph. What does not fit must be
refused, because the system does not refuse it: it promises the memory, and kills the process that uses it.
`check_batch` compares what the tensors alone take, before anything is allocated, and `growing_sizes` what a sample
really costs while an engine warms up. `FreeRuns` bounds runs of free sizes, where the client chooses how large a sample
is.
"""

from __future__ import annotations

import ctypes
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from convoy.app.engines.batch import EngineFailure, FailureScope
from convoy.app.engines.parts import Part
from convoy.models.errors import BundleError
from convoy.models.spec import TensorSpec

# No device gains by a larger batch, and lists as long as the batch are kept for it.
MOST_SAMPLES = 1 << 16
# Of what is available, for a run, or for what a larger batch takes more than the last one did.
_RUN_SHARE = 0.75
_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def available_bytes(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int | None:
    """Memory that this process may still take: what is free here, within what its container may use.

    What the system would give up for it (file caches) counts as free. None where the system does not say.
    """
    known = [*_rooms(proc, cgroup)]
    free_kib = _counters(proc / "meminfo").get("MemAvailable")
    if free_kib is not None:
        known.append(free_kib << 10)
    return max(0, min(known)) if known else None


def resident_bytes(process: int | str = "self") -> int:
    """The memory that a process uses now; 0 where the system does not say, or it is gone."""
    return _counters(_PROC / str(process) / "status").get("VmRSS", 0) << 10


def peak_resident_bytes(proc: Path = _PROC) -> int:
    """The most memory that this process has used; 0 where the system does not say."""
    return _counters(proc / "self" / "status").get("VmHWM", 0) << 10


def is_short() -> bool:
    """Whether less than 1 GiB is left, so that memory that is not in use should be given back."""
    free = available_bytes()
    return free is not None and free < 1 << 30


def give_back_freed() -> None:
    """Let the system have what has been freed, which the C library keeps for the next one. Where it can: glibc."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def sample_bytes(tensors: Sequence[TensorSpec]) -> int:
    """What one sample of all these tensors takes, where sizes are free that of their examples."""
    return sum(
        math.prod(max(1, size) for size in spec.drawn_shape) * (1 if spec.is_strings else spec.numpy_dtype.itemsize)
        for spec in tensors
    )


def check_batch(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    max_batch_size: int,
    available: Callable[[], int | None] = available_bytes,
) -> None:
    """Raises BundleError where a batch's tensors alone would not fit, with the largest batch that does."""
    samples = max(1, max_batch_size)
    each, free = sample_bytes((*inputs, *outputs)), available()
    # Half of what is available is for the run itself, and for everything else.
    room = MOST_SAMPLES if free is None else min(MOST_SAMPLES, free // 2 // max(1, each))
    if samples <= room:
        return
    if room == 0:
        raise BundleError(
            f"the tensors of one sample take {_mib(each)} MiB, but {_mib(free or 0)} MiB of memory are free, half of "
            "it for tensors; use smaller tensors, or give the server more memory"
        )
    why = f"one sample's tensors take {each:,} bytes" if room < MOST_SAMPLES else "a larger batch has no benefit"
    raise BundleError(
        f"max_batch_size {max_batch_size} is too large for this machine: {why}; use at most {room}, "
        "with max_batch_size or --max-batch"
    )


def growing_sizes(
    largest: int,
    *,
    available: Callable[[], int | None] = available_bytes,
    resident: Callable[[], int] = resident_bytes,
) -> Iterator[int]:
    """Batch sizes to run while an engine warms up, from 1 to the largest.

    Each is given only if it is expected to fit, by what the smaller ones have cost. Raises EngineFailure where the next
    one is not.
    """
    size, ran, each = 1, 0, 0.0  # `each`: bytes that one more sample has cost
    start = before = resident()

    def fits(nbytes: float) -> bool:
        free = available()
        return free is None or nbytes <= free * _RUN_SHARE

    while True:
        if not fits(each * (size - ran)):
            free = available() or 0
            room = max(1, ran + int(free * _RUN_SHARE / each))
            raise EngineFailure(
                f"max_batch_size {largest} is too large for this machine: a sample takes {_mib(each)} MiB while it "
                f"runs, and {_mib(free)} MiB are free; use at most {room}, with max_batch_size or "
                "--max-batch",
                FailureScope.MEMORY,
            )
        yield size
        if size == largest:
            return
        now = resident()
        each = max(0.0, now - before) / (size - ran)
        larger = min(2 * size, largest)
        # The growth by fewer samples says nothing about a batch: other threads work, too.
        if size >= 8:
            each = max(each, (now - start) / size)
            if fits(2 * each * (largest - size)):
                larger = largest
        ran, before, size = size, now, larger


def _counters(path: Path) -> dict[str, int]:
    """The numbers in a file of the system that has a name and a number in a line; empty where there is no such file."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    return {name: int(number) for name, number in re.findall(r"^(\w+):?\s+(\d+)", text, re.MULTILINE)}


def _rooms(proc: Path, cgroup: Path) -> Iterator[int]:
    """What each control group that this process is in still has, its own and those around it."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            root, limit, usage = cgroup, "memory.max", "memory.current"
        elif "memory" in kinds.split(","):
            root, limit, usage = cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        for folder in _upwards(root, path):
            # Without a limit there is the word "max", and no file at the top.
            with suppress(OSError, ValueError):
                most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
                counters = _counters(folder / "memory.stat")
                caches = counters.get("total_inactive_file", counters.get("inactive_file", 0))
                yield most - max(0, used - caches)


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """A group's folder and all above it. Inside a container the path is the host's, and only the root is there."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for count in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:count])


def _mib(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):,.1f}"


class FreeRuns:
    """How much of free sizes one engine may run at once.

    The largest batch of the warm-up, at the size of the model's example, has been shown to fit: `usual_bytes` of
    inputs, or some more where these are tiny. Larger batches are run in parts of about as many bytes. A request that is
    larger by itself runs alone, if the memory that it is expected to take is there, and leaves none of it behind.
    """

    def __init__(
        self,
        inputs: Sequence[TensorSpec],
        largest: int,
        *,
        available: Callable[[], int | None] = available_bytes,
        resident: Callable[[], int] = resident_bytes,
    ) -> None:
        each = sum(math.prod(spec.drawn_shape) * spec.numpy_dtype.itemsize for spec in inputs if not spec.is_strings)
        self._more_bytes = (largest - 1) * each  # that the largest batch of the warm-up has, and the first has not
        # At least 1 MiB: an example may be a row of one number, and strings are not counted.
        self.usual_bytes = max(largest * each, 1 << 20)
        self._available, self._resident = available, resident
        self._per_byte = 0.0  # of memory, for each byte of inputs
        self._before = 0

    @staticmethod
    def wanted(inputs: Sequence[TensorSpec]) -> bool:
        """Whether a request says how large a sample of these is."""
        return any(-1 in spec.shape for spec in inputs)

    def ran_one(self) -> None:
        """The engine warms up, and has run one sample: what it took for good, for its weights, is there."""
        self._before = self._resident()

    def ran_largest(self) -> None:
        """It has run its largest batch. Repeating it, when all memory is there already, changes nothing."""
        # A process grows and shrinks by 8 MiB for other reasons while an engine warms up.
        grown = max(0, self._resident() - self._before - (8 << 20))
        # What smaller inputs took cannot be told from that.
        if self._more_bytes >= 64 << 10:
            self._per_byte = max(self._per_byte, grown / self._more_bytes)

    @property
    def usual_run_bytes(self) -> int:
        """What a run of `usual_bytes` is expected to take beside them; 0 where the warm-up took too little to tell."""
        return int(self._per_byte * self.usual_bytes)

    def groups(self, parts: Sequence[Part]) -> Iterator[Sequence[Part]]:
        """The parts in their order, as many together as are usual, and at least one."""
        start, nbytes = 0, 0
        for index, part in enumerate(parts):
            own = input_bytes(part)
            if index > start and nbytes + own > self.usual_bytes:
                yield parts[start:index]
                start, nbytes = index, 0
            nbytes += own
        yield parts[start:]

    def is_large(self, parts: Sequence[Part]) -> bool:
        """Whether these are more than has ever been shown to fit. Raises EngineFailure where they are not to fit."""
        nbytes = sum(map(input_bytes, parts))
        if nbytes <= self.usual_bytes:
            return False
        expected, free = self._per_byte * nbytes, self._available()
        if free is not None and expected > free * _RUN_SHARE:
            raise EngineFailure(
                f"inputs of {nbytes >> 20:,} MiB are expected to take {int(expected) >> 20:,} MiB while they run, and "
                f"{free >> 20:,} MiB are available; send fewer or smaller samples in a request",
                FailureScope.MEMORY,
            )
        return True


def input_bytes(part: Part) -> int:
    """What a request has sent."""
    return sum([source.nbytes for source in part.inputs])
