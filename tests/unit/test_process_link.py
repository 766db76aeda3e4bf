"""An edge's core and the core's registry, both ends in this process: whatever breaks, every byte comes back.

Each answer must be made of its own request's numbers, so memory that is handed out twice would be seen.
"""

from __future__ import annotations

import asyncio
import mmap
import random
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from convoy.app.core import Core, CoreOptions
from convoy.app.edge.oip.exchange import Exchange, Inputs, Terms
from convoy.app.edge.oip.tensors import TensorRef
from convoy.app.loading.load import LoadOptions
from convoy.app.processes.edge_registry import EdgeRegistry
from convoy.app.processes.messages import Extent
from convoy.app.processes.remote_core import RemoteCore
from convoy.app.scheduling.slab import SharedPart, Slab
from convoy.models.errors import NotFound, RequestError, Unavailable
from tests.support.fake_devices import ROW, Workshop, until

PART_BYTES = 4 * mmap.PAGESIZE
OFFSET = 100.0  # of the workshop's first engine


@dataclass
class Link:
    """One core, and the edge that speaks to it now; `breaks` ends their connection as a death would."""

    core: Core
    registry: EdgeRegistry
    memory: mmap.mmap
    address: Path
    edge: RemoteCore
    speaking: asyncio.Task[None]
    incarnations: int = 1

    async def ask(self, value: float, samples: int = 1, timeout_ms: float | None = None) -> float:
        """What the engine added to the rows. Raises the RequestError that a client would get."""
        edge = self.edge
        exchange = Exchange(edge)
        try:
            exchange.begin()
            served = edge.catalog.find("rows", None)
            exchange.hold(served)
            nbytes = samples * ROW * 4
            slot = exchange.reserve(nbytes)
            slot.view[:] = np.full((samples, ROW), value, np.float32).tobytes()
            inputs = Inputs(samples, ((ROW,),), (TensorRef(slot.ref, 0, nbytes),))
            done = await exchange.run(exchange.build_request(served, inputs, (0,), Terms(timeout_ms)))
            (added,) = set((np.frombuffer(done.answers[0].data, np.float32) - value).tolist())
            return float(added)
        finally:
            exchange.close()

    def breaks(self) -> None:
        for part in self.registry.parts:
            if part.edge is not None:
                part.edge.channel.close()

    async def replace_edge(self) -> None:
        """The edge's process dies, and another comes in its place."""
        self.speaking.cancel()
        self.breaks()
        self.incarnations += 1
        self.edge = _edge(self.memory, self.incarnations)
        self.speaking = asyncio.ensure_future(self.edge.stay_connected(self.address))
        await until(lambda: _finds(self.edge))

    def is_at_rest(self) -> bool:
        nothing_lent = not any(part.loans for part in self.registry.parts)
        return nothing_lent and self.edge.slab.used_bytes == self.core.slab.slots_in_use == 0


def _finds(edge: RemoteCore) -> bool:
    try:
        edge.catalog.find("rows", None)
    except RequestError:
        return False
    return True


def _edge(memory: mmap.mmap, incarnation: int) -> RemoteCore:
    return RemoteCore(Slab(PART_BYTES, SharedPart(memory, 0, PART_BYTES)), 0, incarnation)


@asynccontextmanager
async def linked(folder: Path) -> AsyncIterator[tuple[Link, Workshop]]:
    memory = mmap.mmap(-1, 2 * PART_BYTES)
    workshop = Workshop(folder / "store")
    (workshop.folder / "rows" / "1").mkdir(parents=True)
    options = CoreOptions(
        workshop.folder, LoadOptions("auto", 1, None), shared_memory=SharedPart(memory, PART_BYTES, PART_BYTES)
    )
    workshop.core = core = Core(options, load_version=workshop.load)
    await core.start()
    registry = EdgeRegistry(core, [Extent(0, PART_BYTES)])
    address = folder / "channel"
    server = await asyncio.get_running_loop().create_unix_server(registry.receive, str(address))
    edge = _edge(memory, 1)
    link = Link(core, registry, memory, address, edge, asyncio.ensure_future(edge.stay_connected(address)))
    await until(lambda: core.ready and _finds(edge))
    try:
        yield link, workshop
        await until(link.is_at_rest)
    finally:
        link.speaking.cancel()
        link.breaks()
        await asyncio.gather(link.speaking, return_exceptions=True)
        server.close()
        await core.stop()


def play(folder: Path, scene: Callable[[Link, Workshop], Coroutine[None, None, None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(60), linked(folder) as (link, workshop):
            await scene(link, workshop)

    asyncio.run(run())


def test_requests_are_answered_and_counted(tmp_path: Path) -> None:
    async def scene(link: Link, _: Workshop) -> None:
        answers = await asyncio.gather(*(link.ask(float(value), 1 + value % 3) for value in range(40)))
        assert set(answers) == {OFFSET}
        link.edge.call_ended(link.edge.catalog.find("rows", None).key, "v2", "success", 1_000_000)
        await until(lambda: 'outcome="success",protocol="v2",version="1"} 1.0' in link.core.metrics.render().decode())

    play(tmp_path, scene)


def test_what_cannot_be_asked_is_told_in_the_core_s_words(tmp_path: Path) -> None:
    async def scene(link: Link, _: Workshop) -> None:
        with pytest.raises(NotFound, match="'nothing' is not found"):
            link.edge.catalog.find("nothing", None)
        link.core.catalog.find("rows", None).lanes[0].lane.stopping = True
        with pytest.raises(Unavailable, match="the engine of 'rows' is being replaced"):
            await link.ask(1.0)

    play(tmp_path, scene)


def test_a_version_stays_loaded_until_the_edge_needs_it_no_more(tmp_path: Path) -> None:
    async def scene(link: Link, workshop: Workshop) -> None:
        (engine,) = workshop.engines
        engine.gate = gate = threading.Event()
        asking = asyncio.ensure_future(link.ask(1.0))
        await until(lambda: any(link.core.scheduler.running()))
        link.core.lifecycle.take_out_of_service("rows", 1)
        await link.core.catalog.until_known()
        assert not _finds(link.edge)
        assert not engine.closed
        gate.set()
        assert await asking == OFFSET
        await until(lambda: engine.closed == 1)

    play(tmp_path, scene)


def test_what_an_engine_still_reads_is_kept_from_the_next_edge(tmp_path: Path) -> None:
    async def scene(link: Link, workshop: Workshop) -> None:
        (engine,) = workshop.engines
        engine.gate = gate = threading.Event()
        asking = asyncio.ensure_future(link.ask(1.0))
        await until(lambda: any(link.core.scheduler.running()))
        await link.replace_edge()
        assert link.edge.slab.used_bytes > 0, "the new edge keeps off"
        asking.cancel()
        gate.set()
        await until(link.is_at_rest)
        assert await link.ask(2.0) == OFFSET

    play(tmp_path, scene)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_breaks_every_byte_comes_back(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)

    async def client(link: Link) -> None:
        for _ in range(30):
            asking = asyncio.ensure_future(link.ask(dice.random(), dice.randint(1, 4), dice.choice((None, 0.2, 1000))))
            if dice.random() < 0.2:
                await asyncio.sleep(0)
                asking.cancel()
            try:
                assert await asking == OFFSET
            except (RequestError, asyncio.CancelledError):
                await asyncio.sleep(0.001)  # so that a client that is turned away does not ask for ever

    async def scene(link: Link, _: Workshop) -> None:
        clients = [asyncio.ensure_future(client(link)) for _ in range(8)]
        for _ in range(6):
            await asyncio.wait(clients, timeout=0.01)
            if dice.random() < 0.5:
                link.breaks()
            else:
                await link.replace_edge()
        await asyncio.gather(*clients)
        await until(lambda: _finds(link.edge) and link.is_at_rest())
        assert await _in_the_end(link) == OFFSET

    play(tmp_path, scene)


async def _in_the_end(link: Link) -> float:
    """The answer, once the edge has seen that it was cut off and has come back."""
    while True:
        try:
            return await link.ask(5.0)
        except Unavailable:
            await asyncio.sleep(0.001)
