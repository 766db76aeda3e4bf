"""The loops under a clock that only the test moves."""

from __future__ import annotations

import asyncio
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.loadtest.generator import loops
from convoy.loadtest.generator.loops import ClosedLoop, LoopAlarm, OpenLoop, TimerFdAlarm, make_alarm


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1000
        self.due_ns: int | None = None
        self.later: list = []

    def monotonic_ns(self) -> int:
        return self.now_ns


class FakeAlarm:
    name = "fake"

    def __init__(self, clock: Clock, callback) -> None:
        self._clock = clock
        self.ring = callback

    def set(self, due_ns: int) -> None:
        self._clock.due_ns = due_ns

    def close(self) -> None:
        self._clock.due_ns = None


class FakeLoop:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def call_later(self, delay_s, callback):
        self._clock.later.append((delay_s, callback))


class FakeSender:
    def __init__(self) -> None:
        self.fired: list[tuple[int, int]] = []
        self.on_done = lambda arrived: None

    def fire(self, intended_ns: int, now_ns: int) -> None:
        self.fired.append((intended_ns, now_ns))


def make(monkeypatch):
    clock, sender, alarms = Clock(), FakeSender(), []

    def alarm(loop, callback):
        alarms.append(FakeAlarm(clock, callback))
        return alarms[-1]

    monkeypatch.setattr(loops, "make_alarm", alarm)
    monkeypatch.setattr(loops, "time", clock)
    monkeypatch.setattr(loops.asyncio, "get_running_loop", lambda: FakeLoop(clock))
    return clock, sender, alarms


gaps_ns = st.lists(st.integers(0, 50), max_size=200)
wakes_ns = st.lists(st.integers(0, 30), min_size=1, max_size=500)


@given(gaps_ns, wakes_ns)
def test_the_open_loop_sends_each_request_once_never_early_whatever_the_answers(gaps_ns, wakes_ns):
    with pytest.MonkeyPatch.context() as monkeypatch:
        clock, sender, alarms = make(monkeypatch)
        offsets_ns = np.cumsum(gaps_ns, dtype=np.int64)
        loop = OpenLoop(sender, offsets_ns.tolist())
        loop.start(2000)
        for late_ns in wakes_ns:
            if loop.done:
                break
            assert clock.due_ns is not None
            clock.now_ns = max(clock.now_ns, clock.due_ns) + late_ns
            alarms[0].ring()
        unsent_ns = loop.stop()
        intended_ns = [due for due, _ in sender.fired]
        assert intended_ns + unsent_ns == (2000 + offsets_ns).tolist()
        assert all(now_ns >= due_ns for due_ns, now_ns in sender.fired)
        assert loop.done


def test_many_due_at_once_are_sent_in_bursts_so_that_answers_are_read_between(monkeypatch):
    clock, sender, alarms = make(monkeypatch)
    loop = OpenLoop(sender, [0] * (loops.BURST + 1))
    loop.start(clock.now_ns)
    alarms[0].ring()
    assert len(sender.fired) == loops.BURST
    assert clock.due_ns == clock.now_ns
    alarms[0].ring()
    assert len(sender.fired) == loops.BURST + 1


def test_the_closed_loop_keeps_its_clients_busy_until_the_end(monkeypatch):
    clock, sender, _ = make(monkeypatch)
    loop = ClosedLoop(sender, clients=3, duration_s=1e-6, most=100)
    loop.start(clock.now_ns)
    assert len(sender.fired) == 3
    sender.on_done(True)
    assert len(sender.fired) == 4
    clock.now_ns += 1000
    sender.on_done(True)
    assert len(sender.fired) == 4
    assert loop.done


linux = pytest.mark.skipif(sys.platform != "linux", reason="timerfd is Linux's")


@pytest.mark.parametrize("kind", [pytest.param(TimerFdAlarm, marks=linux), LoopAlarm, make_alarm])
def test_an_alarm_rings_once_per_setting_and_closes_twice(kind):
    async def main() -> list[int]:
        rung = asyncio.Event()
        rings = []
        alarm = kind(asyncio.get_running_loop(), lambda: (rings.append(1), rung.set()))
        for _ in range(2):
            alarm.set(1)  # long past
            await rung.wait()
            rung.clear()
        alarm.close()
        alarm.close()
        return rings

    assert asyncio.run(main()) == [1, 1]
