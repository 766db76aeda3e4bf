"""Loads and looks that hang: whoever comes behind them gets on, and what they bring too late is closed."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from convoy.app.engines.machine import Machine
from convoy.app.lifecycle import loads
from convoy.app.lifecycle.loads import Loads, load_giving_way
from convoy.app.lifecycle.store_watch import ModelLook, StoreWatch, look_at_model
from convoy.app.loading.load import LoadedModel, LoadOptions
from convoy.app.server.runtime import at_work, begin, own_clock
from convoy.models.errors import BundleError
from convoy.models.store import Store, StoredVersion
from tests.support.fake_devices import until

OPTIONS = LoadOptions("auto", 1, None)


@dataclass
class Disk:
    """Loads versions; those named in `away` do not come back before their event is set."""

    away: dict[str, threading.Event] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    most_at_once: int = 0
    closed: list[str] = field(default_factory=list)
    idle: set[str] = field(default_factory=set)
    names: dict[int, str] = field(default_factory=dict)  # by the clocks of their threads
    looks: int = 0

    @property
    def held(self) -> list[str]:
        """Those that run, and will until their event is set."""
        return [name for name in self.running if name in self.away]

    def load(self, stored: StoredVersion, _: LoadOptions) -> LoadedModel:
        if (clock := own_clock()) is not None:
            self.names[clock] = stored.name
        self.running.append(stored.name)
        self.most_at_once = max(self.most_at_once, len(self.running))
        if (event := self.away.get(stored.name)) is not None:
            event.wait()
        self.running.remove(stored.name)
        if stored.name.startswith("bad"):
            raise BundleError("bad")
        proved = SimpleNamespace(engine=SimpleNamespace(close=lambda: self.closed.append(stored.name)))
        return LoadedModel(stored, None, (proved,), (), 0.0)  # type: ignore[arg-type]

    def cpu_s(self, clock: int) -> float:
        """What the thread of a load has computed: more at each look, but for those in `idle`."""
        self.looks += 1
        return 0.0 if self.names.get(clock) in self.idle else float(self.looks)


def version(name: str) -> StoredVersion:
    return StoredVersion(name, 1, Path("store") / name / "1")


def test_loads_take_turns_and_one_that_takes_long_gives_its_turn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        disk = Disk()
        own = Loads(disk.load, 60.0, lambda _: None)
        names = [f"m{number}" for number in range(20)]
        loaded = await asyncio.gather(*(own.load(version(name), OPTIONS) for name in names))
        assert [one.stored.name for one in loaded] == names
        assert disk.most_at_once == 1
        disk.away["slow"] = threading.Event()
        slow = asyncio.ensure_future(own.load(version("slow"), OPTIONS))
        await until(lambda: disk.running == ["slow"])
        assert (await own.load(version("m"), OPTIONS)).stored.name == "m"
        disk.away["slow"].set()
        assert (await slow).stored.name == "slow"
        assert disk.closed == []

    monkeypatch.setattr(loads, "_PATIENCE_S", 0.01)
    asyncio.run(scenario())


@pytest.mark.skipif(sys.platform != "linux", reason="only there a thread has a priority of its own")
@pytest.mark.parametrize("has_gpu", [False, True])
def test_what_a_load_starts_gives_way_to_the_event_loop_unless_there_are_gpus(has_gpu: bool) -> None:
    """A library's threads take their priority from the thread that loads."""
    nice: list[int] = []

    def load(stored: StoredVersion, options: LoadOptions) -> LoadedModel:
        own = threading.Thread(target=lambda: nice.append(os.getpriority(os.PRIO_PROCESS, 0)))
        own.start()
        own.join()
        return disk.load(stored, options)

    async def scenario() -> None:
        gpus: Any = (object(),) if has_gpu else ()
        own = Loads(partial(load_giving_way, load), 60.0, lambda _: None)
        await own.load(version("m"), replace(OPTIONS, machine=Machine(gpus=gpus)))

    disk, of_loop = Disk(), os.getpriority(os.PRIO_PROCESS, 0)
    asyncio.run(scenario())
    assert (nice[0] > of_loop) is not has_gpu
    assert os.getpriority(os.PRIO_PROCESS, 0) == of_loop


def test_a_load_that_is_given_up_is_closed_when_it_ends_after_all() -> None:
    async def scenario() -> None:
        late: list[str] = []
        disk = held("hung", "bad")
        own = Loads(disk.load, 0.01, lambda stored: late.append(stored.name))
        for name in ("hung", "bad"):
            with pytest.raises(BundleError, match="did not load within"):
                await own.load(version(name), OPTIONS)
            with pytest.raises(BundleError, match="still hangs"):
                await own.load(version(name), OPTIONS)
            disk.away.pop(name).set()
            await until(lambda name=name: name in late)  # type: ignore[misc]
        await until(lambda: disk.closed == ["hung"])
        own._limit_s = 60.0  # a thread that has nothing to do may be late, too
        assert (await own.load(version("hung"), OPTIONS)).stored.name == "hung"

    asyncio.run(scenario())


def test_work_that_does_not_end_keeps_nobody_and_is_known_by_name() -> None:
    release = threading.Event()

    async def scenario() -> None:
        with pytest.raises(ZeroDivisionError):
            await begin(lambda: 1 / 0, "fails")
        hung = begin(release.wait, "hangs")
        await asyncio.wait({hung}, timeout=0.01)
        assert not hung.done()

    asyncio.run(scenario())  # a pool's thread would be waited for here
    assert at_work() == ["hangs"]
    release.set()
    assert at_work(within_s=60.0) == []


@pytest.mark.parametrize("away", [["b"], ["a"], ["a", "b", "d"], ["d"]])
def test_a_model_whose_folder_does_not_answer_is_left_out_of_the_look(
    tmp_path: Path, away: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abcd":
        (tmp_path / name / "1").mkdir(parents=True)
    answers = {name: threading.Event() for name in away}
    looks: list[str] = []

    def look(store: Store, name: str) -> ModelLook:
        looks.append(name)
        if name in answers:
            answers[name].wait()
        return look_at_model(store, name)

    async def scenario() -> None:
        watch = StoreWatch(Store(tmp_path), patience_s=0.05)
        for _ in range(2):
            found = (await watch.look()).models
            assert sorted(found) == list("abcd")
            assert [name for name in "abcd" if "did not respond within" in found[name].trouble] == sorted(away)
            assert all(list(found[name].versions) == [1] for name in "abcd" if name not in away)
        assert [looks.count(name) for name in away] == [1] * len(away), "nobody else goes where one hangs"
        for event in answers.values():
            event.set()
        await until(lambda: not watch._hanging)
        assert not any(one.trouble for one in (await watch.look()).models.values())

    monkeypatch.setattr("convoy.app.lifecycle.store_watch.look_at_model", look)
    asyncio.run(scenario())


def test_all_who_ask_a_store_that_hangs_share_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away = threading.Event()
    monkeypatch.setattr(Store, "names", lambda self: [] if away.wait() else ["never"])

    async def scenario() -> None:
        watch = StoreWatch(Store(tmp_path), patience_s=0.05)
        for _ in range(3):
            told = await asyncio.gather(*(watch.names() for _ in range(10)), return_exceptions=True)
            assert all("did not respond within" in str(error) for error in told)
        assert at_work().count("look-at-store") == 1
        away.set()
        await until(lambda: not at_work())
        assert await watch.names() == ([], ())

    asyncio.run(scenario())


def held(*names: str) -> Disk:
    return Disk(away={name: threading.Event() for name in names})


@pytest.mark.skipif(sys.platform != "linux", reason="only there a thread's clock is known")
@pytest.mark.parametrize(
    ("cores", "available", "most"), [(4, 400, 1), (4, 1000, 2), (4, 10_000, 4), (1, None, 1), (3, None, 3)]
)
def test_no_more_load_at_once_than_there_is_memory_for(
    monkeypatch: pytest.MonkeyPatch, cores: int, available: int | None, most: int
) -> None:
    """The first took 200 bytes at its peak, so half of what is available has to be enough for so many such.

    Nor more than there are cores, where nothing is known of the memory.
    """

    async def scenario() -> None:
        names = [f"m{number}" for number in range(8)]
        disk = held(*names)
        monkeypatch.setattr(loads, "cpu_s_of", disk.cpu_s)
        monkeypatch.setattr(loads, "peak_resident_bytes", lambda: 250 if disk.running else 50)
        own = Loads(disk.load, 60.0, lambda _: None)
        tasks = [asyncio.create_task(own.load(version(name), OPTIONS)) for name in names]
        while disk.away:
            await until(lambda: len(disk.held) == min(most, len(disk.away)))
            disk.away.pop(disk.held[0]).set()
        await asyncio.gather(*tasks)
        assert disk.most_at_once == most

    machine = {"cpu_budget": cores, "available_bytes": available, "resident_bytes": 50}
    for name in machine:
        monkeypatch.setattr(loads, name, partial(machine.get, name))
    monkeypatch.setattr(loads, "_PATIENCE_S", 0.001)
    asyncio.run(scenario())


@pytest.mark.skipif(sys.platform != "linux", reason="only there a thread's clock is known")
def test_loads_that_hang_take_no_core_and_no_memory_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        hanging, sound = [f"h{number}" for number in range(5)], [f"m{number}" for number in range(6)]
        disk = held(*hanging, *sound)
        disk.idle.update(hanging)
        monkeypatch.setattr(loads, "cpu_s_of", disk.cpu_s)
        own = Loads(disk.load, 60.0, lambda _: None)
        tasks = [asyncio.create_task(own.load(version(name), OPTIONS)) for name in (*hanging, *sound)]
        for number, name in enumerate(sound):
            await until(lambda name=name: disk.held == [*hanging, name])  # type: ignore[misc]
            disk.away.pop(name).set()
            await asyncio.wait({tasks[len(hanging) + number]})
        for name in hanging:
            disk.away[name].set()
        await asyncio.gather(*tasks)
        assert disk.most_at_once == len(hanging) + 1

    monkeypatch.setattr(loads, "cpu_budget", lambda: 1)
    monkeypatch.setattr(loads, "_PATIENCE_S", 0.001)
    asyncio.run(scenario())


def test_a_turn_that_nobody_waits_for_any_more_goes_to_the_next() -> None:
    async def scenario() -> None:
        disk = held("m0")
        own = Loads(disk.load, 60.0, lambda _: None)
        first, left, last = (asyncio.create_task(own.load(version(f"m{n}"), OPTIONS)) for n in range(3))
        await until(lambda: disk.running == ["m0"])
        left.cancel()
        disk.away["m0"].set()
        await asyncio.gather(first, last)
        assert left.cancelled()

    asyncio.run(scenario())
