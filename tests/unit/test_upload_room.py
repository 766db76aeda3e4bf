"""Bodies that wait for memory."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from convoy.app.calls.access import BodyLimits
from convoy.app.calls.refusals import no_room
from convoy.app.http.body import BodyReader, UploadRoom
from convoy.app.scheduling.slab import Slab, Slot


def test_bodies_that_are_cancelled_as_room_comes_leave_it_to_those_behind_them() -> None:
    slab = Slab(1 << 20)

    def reserve(nbytes: int) -> Slot:
        slot = slab.reserve(nbytes)
        if slot is None:
            raise no_room(nbytes, slab)
        return slot

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"x" * 100, "more_body": False}

    async def scene() -> None:
        room, whole = UploadRoom(slab), reserve(1 << 20)
        call: Any = SimpleNamespace(core=SimpleNamespace(slab=slab), reserve=reserve, may_ever_hold=lambda _: True)
        call.late = call.slow = call.body_due_ns = None
        readers = [BodyReader(call, 100, BodyLimits(1 << 20), room) for _ in range(40)]
        reading = [asyncio.ensure_future(reader.read(receive)) for reader in readers]
        await asyncio.sleep(0.01)
        slab.free(whole.ref)
        await asyncio.sleep(0)  # the first ones are told
        for task in reading[:20]:
            task.cancel()
        async with asyncio.timeout(10):
            assert {slot.view.nbytes for slot in await asyncio.gather(*reading[20:])} == {100}

    asyncio.run(scene())
