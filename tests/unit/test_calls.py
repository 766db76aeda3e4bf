"""A call that is cancelled from outside, by its deadline or because its client left: exactly one ending."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.app.calls.call import Call, Inputs, Terms
from convoy.app.calls.open_calls import OpenCalls
from convoy.app.scheduling.policy import RefusalReason, Refuse
from convoy.app.scheduling.request import SECOND_NS, Done, ModelKey, Outcome, Request, TensorRef
from convoy.app.scheduling.slab import Slab, SlotState
from convoy.app.telemetry.outcomes import ANSWERED, ClientGone
from convoy.models.errors import BodyTooLarge, DeadlineExceeded, Overloaded

LATE_NS = 1 << 62


class Bench:
    """A core whose scheduler answers when the test says so."""

    def __init__(self) -> None:
        self.slab, self.calls = Slab(1 << 12), OpenCalls()
        self.submitted: list[asyncio.Future[Done]] = []
        self.given_up: list[Request] = []
        self.failures: list[str] = []
        self.failed_ns: list[int] = []
        self.endings: list[object] = []
        self.catalog = SimpleNamespace(live=lambda key: SimpleNamespace(takes_requests=True))
        self.scheduler = SimpleNamespace(submit=self._submit, cancel=self._cancel)

    def _submit(self, request: Request) -> asyncio.Future[Done]:
        self.submitted.append(asyncio.get_running_loop().create_future())
        return self.submitted[-1]

    def _cancel(self, request: Request) -> None:
        self.submitted[request.id].cancel()
        self.given_up.append(request)

    def request_failed(self, key: object, reason: str, ns: int) -> None:
        self.failures.append(reason)
        self.failed_ns.append(ns)

    def next_request_id(self) -> int:
        return 7

    def call_ended(self, key: object, protocol: str, ending: object, ns: int, stages_ns: object) -> None:
        self.endings.append(ending)


def request(number: int) -> Request:
    return Request(number, ModelKey("m", 1), 1, (), (), (), (), (), 0)


def answer(bench: Bench, number: int = 0) -> None:
    bench.submitted[number].set_result(Done(request(number), Outcome.ANSWERED))


async def begun(bench: Bench, *, requests: int = 1) -> tuple[Call, asyncio.Task[Any]]:
    call: Any = Call(bench, "v2")  # type: ignore[arg-type]
    call.limit(1000)

    async def work() -> list[Done]:
        call.begin()
        call.owed = requests
        try:
            return list(await asyncio.gather(*[call.run(request(number)) for number in range(requests)]))
        except asyncio.CancelledError as raised:
            raise call.cause_of(raised) from None
        finally:
            call.end(ANSWERED)

    task = asyncio.ensure_future(work())
    while len(bench.submitted) < requests:  # noqa: ASYNC110 - some turns of the loop
        await asyncio.sleep(0)
    return call, task


@pytest.mark.parametrize("reason", [DeadlineExceeded, ClientGone])
def test_what_is_answered_in_the_same_turn_is_answered(reason: type[Exception]) -> None:
    async def scene() -> None:
        bench = Bench()
        call, task = await begun(bench)
        answer(bench)
        call.tick(LATE_NS) if reason is DeadlineExceeded else call.cancel(reason())
        (done,) = await task
        assert done.outcome is Outcome.ANSWERED
        assert (bench.failures, bench.given_up, bench.endings) == ([], [], [ANSWERED])

    asyncio.run(scene())


@pytest.mark.parametrize(("reason", "failure"), [(DeadlineExceeded, "REJECTED"), (ClientGone, "CANCELED")])
def test_what_is_not_answered_ends_with_the_first_reason(reason: type[Exception], failure: str) -> None:
    async def scene() -> None:
        bench = Bench()
        call, task = await begun(bench)
        call.tick(LATE_NS) if reason is DeadlineExceeded else call.cancel(reason())
        call.cancel(RuntimeError("the second reason"))
        assert bench.failures == [failure], "its batch may be counted in this turn"
        with pytest.raises(reason):
            await task
        assert (bench.failures, len(bench.given_up), len(bench.calls)) == ([failure], 1, 0)
        call.tick(LATE_NS)
        assert task.cancelling() == 0

    asyncio.run(scene())


def test_a_task_that_others_cancel_gives_its_request_up() -> None:
    async def scene() -> None:
        bench = Bench()
        _, task = await begun(bench)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (bench.failures, len(bench.given_up)) == (["CANCELED"], 1)

    asyncio.run(scene())


def test_a_form_is_late_until_its_last_answer() -> None:
    async def scene() -> None:
        bench = Bench()
        call, task = await begun(bench, requests=2)
        answer(bench, 0)
        call.tick(LATE_NS)
        with pytest.raises(DeadlineExceeded):
            await task
        assert bench.failures == ["REJECTED"]

    asyncio.run(scene())


@pytest.mark.parametrize("is_queued", [True, False])
def test_what_fails_is_counted_with_the_time_since_it_came(is_queued: bool) -> None:
    async def scene() -> None:
        bench = Bench()
        call: Any = Call(bench, "v2")  # type: ignore[arg-type]
        call.arrival_ns -= 5 * SECOND_NS
        call.served = SimpleNamespace(key=ModelKey("m", 1), leave=lambda: None)
        call.begin()
        if is_queued:
            waiting = request(0)
            waiting.arrival_ns = time.monotonic_ns() - 5 * SECOND_NS
            call._requests[bench._submit(waiting)] = waiting
        else:
            call.body_due_ns = call.arrival_ns
        call.cancel(DeadlineExceeded("late"))
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(0)
        call.end(ANSWERED)
        took_ns = call.ended_ns - call.arrival_ns
        assert bench.failures == ["REJECTED"]
        assert all(5 * SECOND_NS <= ns < 600 * SECOND_NS for ns in (*bench.failed_ns, took_ns))

    asyncio.run(scene())


def test_a_refusal_is_counted_with_the_time_since_the_request_came() -> None:
    async def scene() -> None:
        bench: Any = Bench()
        bench.scheduler.submit = lambda request: Refuse(RefusalReason.QUEUE_FULL, SECOND_NS)
        bench.max_waiting = lambda key: 4
        refused = request(0)
        refused.arrival_ns = time.monotonic_ns() - 5 * SECOND_NS
        with pytest.raises(Overloaded, match="4 samples"):
            await Call(bench, "v2").run(refused)
        assert bench.failures == ["REJECTED"]
        assert 5 * SECOND_NS <= bench.failed_ns[0] < 600 * SECOND_NS

    asyncio.run(scene())


@given(
    sizes=st.lists(st.none() | st.integers(1, 40), min_size=1, max_size=5),
    samples=st.integers(1, 4),
    terms=st.builds(Terms, st.none() | st.integers(0, 5000), st.integers(0, 3)),
    timeout_ms=st.none() | st.floats(0.5, 1e5),
)
def test_a_request_has_room_for_each_output_and_the_terms_of_its_call(
    sizes: list[int | None], samples: int, terms: Terms, timeout_ms: float | None
) -> None:
    bench = Bench()
    call: Any = Call(bench, "v2")  # type: ignore[arg-type]
    call.limit(timeout_ms)
    outputs = [SimpleNamespace(sample_bytes=size) for size in sizes]
    served = SimpleNamespace(key=ModelKey("m", 1), spec=SimpleNamespace(outputs=outputs))
    source, wanted = call.reserve(16), tuple(reversed(range(len(sizes))))
    inputs = Inputs(samples, ((4,),), (TensorRef(source.ref, 0, 16),))
    made = call.build_request(served, inputs, wanted, terms)

    assert (made.id, made.key, made.samples, made.priority) == (7, served.key, samples, terms.priority)
    assert made.deadline_ns == (None if timeout_ms is None else call.arrival_ns + int(timeout_ms * 1_000_000))
    latest_start_us = terms.latest_start_us
    assert made.latest_start_ns == (None if latest_start_us is None else call.arrival_ns + 1000 * latest_start_us)
    places = [None if ref is None else bench.slab.tensor(ref) for ref in made.outputs]
    for number, (index, place) in enumerate(zip(wanted, places, strict=True)):
        size = sizes[index]
        assert (None if place is None else place.nbytes) == (None if size is None else samples * size)
        if place is not None:
            place[:] = bytes([number]) * place.nbytes
    for number, place in enumerate(places):
        assert place is None or set(place) == {number}, "no two share a byte"
    assert made.slots[0] == source.ref
    assert len(made.slots) == len(set(made.slots)) == bench.slab.slots_in_use
    call.end(ANSWERED)
    assert not bench.slab.used_bytes


def test_what_never_fits_is_too_large_and_what_others_are_in_the_way_of_may_come_again() -> None:
    bench = Bench()
    other, call = (Call(bench, "v2") for _ in range(2))  # type: ignore[arg-type]
    held = call.reserve(128)
    other.reserve(64)
    rest = bench.slab.capacity_bytes - 128
    with pytest.raises(Overloaded):
        call.reserve(rest)
    with pytest.raises(BodyTooLarge, match=f"takes {rest + 129} bytes"):
        call.reserve(rest + 1)
    other.end(ANSWERED)
    call.reserve(rest)
    call.release(held)
    assert call.held_bytes == bench.slab.used_bytes == rest


def test_what_two_decoders_share_comes_back_with_the_last_of_them() -> None:
    bench = Bench()
    call = Call(bench, "v2")  # type: ignore[arg-type]
    body, one, other = (call.reserve(64) for _ in range(3))
    for own in (one, other):
        call.begin_decode((body, own))
    call.end_decode((body, one))
    assert [slot.state for slot in (body, one, other)] == [SlotState.DECODING, SlotState.FILLING, SlotState.DECODING]
    call.end(ANSWERED)
    assert [slot.state for slot in (body, one, other)] == [SlotState.DECODING, SlotState.FREE, SlotState.DECODING]
    call.end_decode((body, other))
    assert not bench.slab.used_bytes
