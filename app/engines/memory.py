"""How large a batch may be, compared with the available memory.

Sizes come from outside: load requests, configuration, manifests, graphs. What does not fit must be refused here,
because the system does not refuse it: it overcommits memory and kills the process that uses it.

`check_batch` compares what the tensors alone take, before anything is allocated. `growing_sizes` measures what a sample
costs while an engine warms up. `FreeRuns` bounds runs of dynamic sizes, where clients choose the size of a sample.
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

# No device gains from larger batches, and some lists are as long as the batch.
MOST_SAMPLES = 1 << 16
# The share of available memory for a run, or for what a larger batch takes more than the last one.
_RUN_SHARE = 0.75
_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def available_bytes(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int | None:
    """The memory that this process may still use: free on the machine and within the container's limit.

    Memory that the system can reclaim (file caches) counts as free. None if the system does not tell.
    """
    known = [*_rooms(proc, cgroup)]
    free_kib = counters(proc / "meminfo").get("MemAvailable")
    if free_kib is not None:
        known.append(free_kib << 10)
    return max(0, min(known)) if known else None


def resident_bytes(process: int | str = "self") -> int:
    """The resident memory of a process; 0 if the system does not tell or the process is gone."""
    return counters(_PROC / str(process) / "status").get("VmRSS", 0) << 10


def peak_resident_bytes(proc: Path = _PROC) -> int:
    """The peak resident memory of this process; 0 if the system does not tell."""
    return counters(proc / "self" / "status").get("VmHWM", 0) << 10


def is_short() -> bool:
    """Whether less than 1 GiB is left, so that unused memory should be freed."""
    free = available_bytes()
    return free is not None and free < 1 << 30


def give_back_freed() -> None:
    """Return freed memory that glibc keeps to the system."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def sample_bytes(tensors: Sequence[TensorSpec]) -> int:
    """The bytes of one sample of all these tensors; dynamic sizes are the example's."""
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
    """Raise BundleError, with the largest batch that fits, if a batch's tensors alone do not fit into memory."""
    samples = max(1, max_batch_size)
    each, free = sample_bytes((*inputs, *outputs)), available()
    # Half of the available memory is for the run itself and everything else.
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
    """Batch sizes for a warm-up, from 1 to the largest.

    Yields each size only if the cost of smaller ones shows that it fits. Raises EngineFailure if the next one does not.
    """
    size, ran, each = 1, 0, 0.0  # `each`: the measured bytes of one more sample
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
        # Growth by few samples says nothing about a batch, because other threads allocate as well.
        if size >= 8:
            each = max(each, (now - start) / size)
            if fits(2 * each * (largest - size)):
                larger = largest
        ran, before, size = size, now, larger


def counters(path: Path) -> dict[str, int]:
    """Parse lines of name and number in a system file; empty if the file does not exist."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    return {name: int(number) for name, number in re.findall(r"^(\w+):?\s+(\d+)", text, re.MULTILINE)}


def _rooms(proc: Path, cgroup: Path) -> Iterator[int]:
    """The remaining memory of each control group of this process and its parents."""
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
            # Without a limit the file has the word "max", or does not exist at the top.
            with suppress(OSError, ValueError):
                most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
                stat = counters(folder / "memory.stat")
                caches = stat.get("total_inactive_file", stat.get("inactive_file", 0))
                yield most - max(0, used - caches)


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """A group's folder and its parents. In a container the path is the host's, and only the root exists."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for count in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:count])


def _mib(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):,.1f}"


class FreeRuns:
    """Bounds the dynamic sizes that one engine runs at once.

    The warm-up has shown that the largest batch at the example's size fits: `usual_bytes` of inputs, or a little more
    if they are tiny. Larger batches run in parts of about that size. A larger request runs alone if its expected memory
    is available, and that memory is freed after the run.
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
        self._more_bytes = (largest - 1) * each  # bytes of the largest batch of the warm-up beyond the first
        # At least 1 MiB: an example may be a row of one number, and strings are not counted.
        self.usual_bytes = max(largest * each, 1 << 20)
        self._available, self._resident = available, resident
        self._per_byte = 0.0  # bytes of memory per byte of inputs
        self._before = 0

    @staticmethod
    def wanted(inputs: Sequence[TensorSpec]) -> bool:
        """Whether a request chooses the size of a sample."""
        return any(-1 in spec.shape for spec in inputs)

    def ran_one(self) -> None:
        """Note that the warm-up has run one sample, which allocates memory for good, such as for weights."""
        self._before = self._resident()

    def ran_largest(self) -> None:
        """Note that the largest batch has run. Repeating it, with all memory allocated, changes nothing."""
        # A process grows and shrinks by 8 MiB for other reasons during a warm-up.
        grown = max(0, self._resident() - self._before - (8 << 20))
        # Smaller inputs are too small to measure by that.
        if self._more_bytes >= 64 << 10:
            self._per_byte = max(self._per_byte, grown / self._more_bytes)

    @property
    def usual_run_bytes(self) -> int:
        """The expected memory of a run of `usual_bytes` beside its inputs; 0 if it was too small to measure."""
        return int(self._per_byte * self.usual_bytes)

    def groups(self, parts: Sequence[Part]) -> Iterator[Sequence[Part]]:
        """Split the parts in order into groups of the usual size, each with at least one."""
        start, nbytes = 0, 0
        for index, part in enumerate(parts):
            own = input_bytes(part)
            if index > start and nbytes + own > self.usual_bytes:
                yield parts[start:index]
                start, nbytes = index, 0
            nbytes += own
        yield parts[start:]

    def is_large(self, parts: Sequence[Part]) -> bool:
        """Whether these parts exceed what is known to fit. Raises EngineFailure if they are not expected to fit."""
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
    """The bytes of a request's inputs."""
    return sum([source.nbytes for source in part.inputs])
