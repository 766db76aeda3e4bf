"""One slot for a whole request: what came, and behind it the room for its outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from convoy.app.edge.oip.call import Call, Terms
from convoy.app.scheduling.request import Request, TensorPlace
from convoy.app.scheduling.slab import Slot, aligned


@dataclass(slots=True, eq=False)
class Pattern:
    """A request that is made again and again: one slot of `nbytes` has what comes, and its outputs behind that.

    `like` is such a request, whose slots, terms and times are not those of the others.
    """

    like: Request
    nbytes: int

    @classmethod
    def of(
        cls, request: Request, inputs: tuple[TensorPlace, ...], input_bytes: int, sizes: Iterable[int | None]
    ) -> Pattern:
        """`inputs` lie somewhere in the first `input_bytes`; `sizes` are the outputs', None: only the run knows."""
        outputs: list[TensorPlace | None] = []
        nbytes = input_bytes
        for size in sizes:
            if size is None:
                outputs.append(None)
                continue
            start = aligned(nbytes)
            outputs.append(TensorPlace(0, start, size))
            nbytes = start + size
        like = replace(request, slots=request.slots[:1], inputs=inputs, outputs=tuple(outputs))
        return cls(like, nbytes)

    def request(self, call: Call, slot: Slot, terms: Terms) -> Request:
        """The call's, of what is in the slot."""
        return call.repeat_request(self.like, (slot.ref,), terms)

    def request_of(self, call: Call, data: bytes | memoryview, terms: Terms) -> Request:
        """The call's, of these bytes, which are copied. Raises Overloaded."""
        slot = call.reserve(self.nbytes)
        slot.view[: len(data)] = data
        return self.request(call, slot, terms)
