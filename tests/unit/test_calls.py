"""A call that is cancelled from outside, by its deadline or because its client left: exactly one ending."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from convoy.app.calls.call import Call
from convoy.app.calls.open_calls import OpenCalls
from convoy.app.scheduling.request import Done, ModelKey, Outcome, Request
from convoy.app.scheduling.slab import Slab
from convoy.app.telemetry.outcomes import ANSWERED, ClientGone
from convoy.models.errors import DeadlineExceeded

LATE_NS = 1 << 62


class Bench:
    """A core whose scheduler answers when the test says so."""

    def __init__(self) -> None:
        self.slab, self.calls = Slab(1 << 12), OpenCalls()
        self.submitted: list[asyncio.Future[Done]] = []
        self.given_up: list[Request] = []
        self.failures: list[str] = []
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
