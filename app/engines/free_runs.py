"""How much memory runs of free sizes may take: clients choose how large a sample is.

What has been shown to fit is the largest batch of the warm-up, at the size of the model's example. Larger batches are
run in parts of about as many bytes; a request that is larger by itself runs alone, if the memory that it is expected to
take is there, and leaves none of it behind. Knows bytes, and no library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from convoy.app.engines.batch import EngineFailure, FailureScope
from convoy.app.engines.memory import available_bytes, resident_bytes
from convoy.app.engines.parts import Part
from convoy.models.spec import TensorSpec


class FreeRuns:
    """The bound for one engine. `usual_bytes` of inputs may run together: as many as its largest batch of examples has,
    or some more where these are tiny."""

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
        # A quarter of what is available stays for everything else.
        if free is not None and expected > free * 0.75:
            raise EngineFailure(
                f"inputs of {nbytes >> 20:,} MiB are expected to take {int(expected) >> 20:,} MiB while they run, and "
                f"{free >> 20:,} MiB are available; send fewer or smaller samples in a request",
                FailureScope.MEMORY,
            )
        return True


def input_bytes(part: Part) -> int:
    """What a request has sent."""
    return sum([source.nbytes for source in part.inputs])
