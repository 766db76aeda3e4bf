"""An edge's core and the core's registry, both ends in this process: whatever breaks, every byte comes back.

Each answer must be made of its own request's numbers, so memory that is handed out twice would be seen. The core
believes no reference of an edge: whoever names what it may not, or what does not fit the model, is hung up on.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import structs

from convoy.app.core import Core, CoreOptions
from convoy.app.edge.oip.call import Call, Inputs, Terms
from convoy.app.edge.oip.tensors import TensorRef
from convoy.app.loading.load import LoadedModel, LoadOptions
from convoy.app.outcomes import ANSWERED, FAILED
from convoy.app.processes.channel import Channel
from convoy.app.processes.edge_registry import EdgeRegistry
from convoy.app.processes.messages import Extent, Message, Submit
from convoy.app.processes.remote_core import CORE_IS_AWAY, RemoteCore
from convoy.app.scheduling.request import Done, Outcome, Request, TensorPlace
from convoy.app.scheduling.slab import SharedPart, Slab
from convoy.models.errors import DeadlineExceeded, NotFound, RequestError, Unavailable
from convoy.models.spec import ModelSpec, TensorSpec
from convoy.models.store import StoredVersion
from tests.support.fake_devices import ROW, WatchedEngine, Workshop, proved, until
from tests.support.fake_engine import FakeEngine
from tests.support.pipes import join

PART_BYTES = 4 * mmap.PAGESIZE
# Before it lies memory that is nobody's, behind it the core's.
PART = Extent(PART_BYTES, PART_BYTES)
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
    # What the core hears instead of a message of the edge's.
    tampered: Callable[[Message], Message] = lambda message: message

    async def ask(self, value: float, samples: int = 1, timeout_ms: float | None = None) -> float:
        """What the engine added to the rows. Raises the RequestError that a client would get."""
        call, ending = Call(self.edge, "v2"), FAILED
        try:
            done = await call.run(self.request(call, value, samples, timeout_ms))
            (added,) = set((np.frombuffer(done.answers[0].data, np.float32) - value).tolist())
            ending = ANSWERED
            return float(added)
        finally:
            call.end(ending)

    def request(self, call: Call, value: float, samples: int = 1, timeout_ms: float | None = None) -> Request:
        """The call's, which begins with it. Raises RequestError."""
        call.begin()
        served = call.find("rows", None)
        nbytes = samples * ROW * 4
        slot = call.reserve(nbytes)
        slot.view[:] = np.full((samples, ROW), value, np.float32).tobytes()
        inputs = Inputs(samples, ((ROW,),), (TensorRef(slot.ref, 0, nbytes),))
        return call.build_request(served, inputs, (0,), Terms(timeout_ms))

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
    return RemoteCore(Slab(PART_BYTES, SharedPart(memory, *PART)), 0, incarnation)


@asynccontextmanager
async def linked(folder: Path, make: Callable[[Path], Workshop] = Workshop) -> AsyncIterator[tuple[Link, Workshop]]:
    memory = mmap.mmap(-1, 3 * PART_BYTES)
    workshop = make(folder / "store")
    (workshop.folder / "rows" / "1").mkdir(parents=True)
    options = CoreOptions(
        workshop.folder, LoadOptions("auto", 1, None), shared_memory=SharedPart(memory, 2 * PART_BYTES, PART_BYTES)
    )
    workshop.core = core = Core(options, load_version=workshop.load)
    await core.start()
    registry = EdgeRegistry(core, [PART], os.getpid())
    address = folder / "channel"

    def receive() -> Channel:
        """Both ways by the test, which may change what the edge says."""
        to_core = Channel(lambda message: to_edge.send(message), lambda: to_edge.close())
        to_edge = Channel(lambda message: to_core.send(link.tampered(message)), to_core.close)
        join(to_core, registry.receive())
        return to_edge

    server = await asyncio.get_running_loop().create_unix_server(receive, str(address))
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
        await until(lambda: 'outcome="success",protocol="v2",version="1"} 40.0' in link.core.metrics.render().decode())

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


def test_an_edge_knows_for_how_many_engines_it_may_decode_ahead(tmp_path: Path) -> None:
    async def scene(link: Link, workshop: Workshop) -> None:
        def known() -> int:
            return link.edge.catalog.find("rows", None).engines

        before = known()
        assert before == len(workshop.served().lanes)
        link.core.lanes.open(workshop.served(), proved(WatchedEngine("fake:9", OFFSET)))
        await until(lambda: known() == before + 1)

    play(tmp_path, scene)


@pytest.mark.parametrize("is_lost", [False, True], ids=["it-is-answered", "the-core-is-lost"])
def test_a_bug_in_who_waits_costs_no_other_its_answer(tmp_path: Path, is_lost: bool) -> None:
    async def scene(link: Link, workshop: Workshop) -> None:
        bugs = list[str]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: bugs.append(context["message"]))
        (engine,) = workshop.engines
        engine.gate = gate = threading.Event()
        call = Call(link.edge, "v2")

        def fail(_: object) -> None:
            raise RuntimeError("who waits is broken")

        link.edge.take(link.request(call, 1.0), fail)
        asking = asyncio.ensure_future(link.ask(1.0))
        await until(lambda: any(link.core.scheduler.running()))
        if is_lost:
            link.breaks()
        gate.set()
        if is_lost:
            with pytest.raises(Unavailable):
                await asking
        else:
            assert await asking == OFFSET
        call.end(FAILED)
        (bug,) = bugs
        assert "this is a bug" in bug
        await until(lambda: _finds(link.edge))

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


# What the core believes of a request

SPEC = ModelSpec(
    "rows",
    (TensorSpec("a", "FP32", (4,)), TensorSpec("b", "UINT8", (-1,))),
    (TensorSpec("y", "FP32", (2,)), TensorSpec("z", "INT64", (-1,))),
    8,
    None,
    "none",
    (),
)
A, B, Y = TensorPlace(0, 0, 32), TensorPlace(0, 40, 6), TensorPlace(1, 0, 16)


class OtherWorkshop(Workshop):
    """Its model gives the first half of `a` and all of `b` back."""

    def load(self, stored: StoredVersion, options: LoadOptions) -> LoadedModel:
        engine = FakeEngine(
            SPEC.inputs,
            SPEC.outputs,
            max_batch_size=SPEC.max_batch_size,
            run_rows=lambda arrays: [arrays[0][:, :2], arrays[1].astype(np.int64)],
        )
        return LoadedModel(stored, SPEC, (proved(engine),), (), 0.0)  # type: ignore[arg-type]


async def lend(link: Link, **changes: Any) -> list[list[float]] | RequestError:
    """What becomes of a right request with changes: its answers, or what a client would get.

    The core holds nothing afterwards, and the edge has its memory back.
    """
    edge = link.edge
    await until(lambda: edge.is_present and link.is_at_rest())
    body, answer = edge.reserve(64), edge.reserve(16)
    body.view[:32] = np.arange(8, dtype=np.float32).tobytes()
    body.view[40:46] = bytes(range(6))
    request = Request(
        id=edge.next_request_id(),
        key=edge.catalog.find("rows", None).key,
        samples=2,
        shapes=((4,), (3,)),
        slots=(body.ref, answer.ref),
        inputs=(A, B),
        wanted=(0, 1),
        outputs=(Y, None),
        arrival_ns=time.monotonic_ns(),
    )
    for name, value in changes.items():
        setattr(request, name, value)
    ended: asyncio.Future[Done | RequestError] = asyncio.get_running_loop().create_future()
    edge.take(request, ended.set_result)
    done = await ended
    found: list[list[float]] | RequestError
    if isinstance(done, RequestError):
        found = done
    else:
        assert done.outcome is Outcome.ANSWERED
        assert link.core.slab.used_bytes == 0, "what is adopted is counted where it is lent from"
        kinds = [np.float32 if index == 0 else np.int64 for index in request.wanted]
        found = [np.frombuffer(one.data, kind).tolist() for one, kind in zip(done.answers, kinds, strict=True)]
        edge.slab.free(*request.slots)
    await until(lambda: edge.is_present and link.is_at_rest())
    return found


def is_hung_up_on(found: object) -> bool:
    return isinstance(found, Unavailable) and str(found) == CORE_IS_AWAY


@contextmanager
def lending(folder: Path) -> Iterator[tuple[Link, Callable[..., Any]]]:
    """A link, and `lend` over it from where no loop runs, for many examples on one core."""
    with asyncio.Runner() as runner:
        opened = linked(folder, OtherWorkshop)
        link, _ = runner.run(opened.__aenter__())
        yield link, lambda **changes: runner.run(lend(link, **changes))
        runner.run(opened.__aexit__(None, None, None))


def test_what_the_edge_writes_is_what_the_core_reads_and_the_other_way_round(tmp_path: Path) -> None:
    with lending(tmp_path) as (_, lend):
        assert lend() == [[0, 1, 4, 5], [0, 1, 2, 3, 4, 5]]
        assert lend(wanted=(1, 0), outputs=(None, Y)) == [[0, 1, 2, 3, 4, 5], [0, 1, 4, 5]]
        assert isinstance(lend(latest_start_ns=7), DeadlineExceeded)
        assert isinstance(lend(deadline_ns=7), DeadlineExceeded)


def near(right: int) -> st.SearchStrategy[int]:
    return st.just(right) | st.integers(-3, 100)


def places(*right: TensorPlace) -> st.SearchStrategy[TensorPlace]:
    slots = st.integers(-2, 3)
    return st.sampled_from(right).flatmap(
        lambda one: st.builds(TensorPlace, st.just(one.slot) | slots, near(one.offset), near(one.nbytes))
    )


@given(
    st.tuples(places(A), places(B)).map(list) | st.lists(places(A, B), min_size=1, max_size=3),
    st.tuples(places(Y), st.none()).map(list) | st.lists(st.none() | places(Y), max_size=3),
    st.just(2) | st.integers(-1, 9),
)
def _whatever_passes_lies_inside(
    lend: Callable[..., Any], inputs: list[TensorPlace], outputs: list[TensorPlace | None], samples: int
) -> None:
    named = [place for place in (*inputs, *outputs) if place is not None]
    lies_inside = all(
        0 <= place.slot < 2 and 0 <= place.offset <= place.offset + place.nbytes <= (64, 16)[place.slot]
        for place in named
    )
    found = lend(inputs=tuple(inputs), outputs=tuple(outputs), samples=samples)
    assert is_hung_up_on(found) or (lies_inside and len(found) == 2)


def test_whatever_passes_lies_inside(tmp_path: Path) -> None:
    with lending(tmp_path) as (_, lend):
        _whatever_passes_lies_inside(lend)


def test_no_extent_outside_the_edges_part(tmp_path: Path) -> None:
    @given(st.integers(-PART_BYTES, 4 * PART_BYTES), st.integers(-PART_BYTES, 4 * PART_BYTES))
    def check(offset: int, nbytes: int) -> None:
        end = PART.offset + PART.nbytes
        assume(nbytes < 0 or offset < PART.offset or offset + nbytes > end)
        # Long enough for what is to lie there, where it can be.
        lies = Extent(offset, nbytes if nbytes < 0 or offset + nbytes > end else max(64, nbytes))
        link.tampered = lambda message: (
            structs.replace(message, extents=(lies, *message.extents[1:])) if isinstance(message, Submit) else message
        )
        assert is_hung_up_on(lend())

    with lending(tmp_path) as (link, lend):
        check()
        link.tampered = lambda message: message
        assert lend() == [[0, 1, 4, 5], [0, 1, 2, 3, 4, 5]]


def test_what_does_not_fit_the_model_does_not_pass(tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [
        {"samples": 0},
        {"samples": 9},
        {"samples": 3},
        {"shapes": ((4,),)},
        {"shapes": ((4,), (-3,))},
        {"shapes": ((5,), (3,))},
        {"inputs": (A,)},
        {"inputs": (TensorPlace(0, 40, 32), B)},
        {"inputs": (TensorPlace(2, 0, 32), B)},
        {"inputs": (TensorPlace(0, -1, 32), B)},
        {"wanted": (0,)},
        {"wanted": (0, 2)},
        {"wanted": (0, -1)},
        {"outputs": (TensorPlace(1, 0, 17), None)},
        {"outputs": (Y, Y)},
        {"outputs": (None, None)},
    ]
    with lending(tmp_path) as (_, lend):
        assert [change for change in wrong if not is_hung_up_on(lend(**change))] == []
