"""Building plans in a child: what it says, how it may end, and that it never outlives patience or the server.

The child is real and does what its script says; patience is a clock that only the test moves.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from convoy.app.engines.plan_builder import (
    BuildLimits,
    BuildOrder,
    PlanBuild,
    PlanBuilder,
    visible_device,
)
from convoy.models.plans import BuildOptions
from tests.support.stores import ROOT

# `say` lines, `tell` its own circumstances, then `wait` for a byte that never comes or `end`.
CHILD = """
import json, os, sys, time
steps = json.loads(sys.argv[1])
for step in steps:
    match step:
        case ["say", text]: print(text, flush=True)
        case ["complain", text]: print(text, file=sys.stderr, flush=True)
        case ["tell", path]:
            about = dict(arguments=sys.argv[2:], visible=os.environ.get("CUDA_VISIBLE_DEVICES"), pid=os.getpid(),
                         nice=os.getpriority(os.PRIO_PROCESS, 0), group=os.getpgid(0))
            open(path + ".part", "w").write(json.dumps(about)); os.rename(path + ".part", path)
        case ["wait", fifo]: open(fifo).read(1)
        case ["babble", bytes]: print("x" * bytes, end="", flush=True)
        case ["silence"]: os.close(1); os.close(2)
        case ["end", code]: os._exit(code)
        case ["die", number]: os.kill(os.getpid(), number)
"""


def event(kind: str, text: str, **more: object) -> list[str]:
    return ["say", json.dumps({"kind": kind, "text": text, "elapsed_s": 1.0, **more})]


class Bench:
    """A builder whose child follows a script, and whose patience moves with `pass_s`."""

    def __init__(self, folder: Path, limits: BuildLimits | None = None) -> None:
        self.folder = folder
        self.fifo = folder / "never"
        os.mkfifo(self.fifo)
        (folder / "child.py").write_text(CHILD)
        self.limits = limits or BuildLimits(time_limit_s=100, grace_s=10, niceness=3)
        self.clock_s = 0.0
        self.used_bytes = 0
        self.heard: list[PlanBuild] = []
        self._ticks: list[asyncio.Future[None]] = []

    def builder(self, *steps: list[object]) -> PlanBuilder:
        return PlanBuilder(
            self.limits,
            command=(sys.executable, str(self.folder / "child.py"), json.dumps(steps)),
            now_s=lambda: self.clock_s,
            pause=self._pause,
            memory_of=lambda pid: self.used_bytes,
        )

    def order(self, gpu: int = 0) -> BuildOrder:
        options = BuildOptions("fp16", (1, 8), workspace_mb=512)
        return BuildOrder(self.folder / "fp16.onnx", self.folder / "plans", options, gpu, beside_mb=700)

    async def build(self, *steps: list[object]) -> PlanBuild:
        return await self.builder(*steps).build(self.order(), self.heard.append)

    def about_child(self) -> Path:
        return self.folder / "about"

    async def child(self) -> dict:
        await until(self.about_child().exists)
        return json.loads(self.about_child().read_text())

    async def pass_s(self, seconds: float) -> None:
        """Let time pass, and the guard look."""
        await until(lambda: bool(self._ticks))
        self.clock_s += seconds
        for tick in self._ticks:
            if not tick.done():
                tick.set_result(None)
        self._ticks.clear()
        for _ in range(3):
            await asyncio.sleep(0)

    async def _pause(self, seconds: float) -> None:
        tick = asyncio.get_running_loop().create_future()
        self._ticks.append(tick)
        await tick


async def until(happened: Callable[[], bool]) -> None:
    while not happened():  # noqa: ASYNC110 - another process makes it happen
        await asyncio.sleep(0.001)


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_build_is_followed_from_its_first_step_to_the_plan(bench: Bench) -> None:
    steps = (
        ["say", "a library says hello"],
        event("progress", "Building", step=1, total=4),
        event("progress", "Tactics", step=7, total=900, parent="Building"),
        event("note", "the timing cache is new"),
        event("progress", "Building", step=2, total=4),
        event("done", "/plans/x.plan"),
        ["end", 0],
    )
    ended = asyncio.run(bench.build(*steps))
    assert ended == bench.heard[-1]
    assert (ended.state, ended.plan, ended.reason) == ("built", Path("/plans/x.plan"), None)
    assert [(one.state, one.phase, one.step, one.total) for one in bench.heard] == [
        ("waiting", "", 0, 0),
        ("building", "", 0, 0),
        ("building", "Building", 1, 4),
        ("building", "Building", 2, 4),
        ("built", "Building", 2, 4),
    ]


def test_a_child_of_somebody_nicer_stays_as_nice(tmp_path: Path) -> None:
    """Only root could take niceness back, and everybody else would get no plan."""
    code = (
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "from convoy.app.engines.plan_builder import BuildLimits, BuildOrder, PlanBuilder\n"
        "from convoy.models.plans import BuildOptions\n"
        "os.nice(7)\n"
        "command = (sys.executable, '-c', 'import os; raise SystemExit(os.nice(0))')\n"
        "order = BuildOrder(Path('x.onnx'), Path('plans'), BuildOptions('fp16', (1,)))\n"
        "builder = PlanBuilder(BuildLimits(niceness=3), command=command)\n"
        "ended = asyncio.run(builder.build(order, lambda progress: None))\n"
        "print(ended.reason.removesuffix(str(os.nice(0))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout.strip() == "the builder exited with code", done.stderr


def test_the_child_is_told_everything_and_yields_to_serving(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa,GPU-bb")

    async def scenario() -> None:
        steps = (["tell", str(bench.about_child())], ["wait", str(bench.fifo)])
        building = asyncio.ensure_future(bench.builder(*steps).build(bench.order(gpu=1), bench.heard.append))
        child = await bench.child()
        assert child["visible"] == "GPU-bb"
        nice = max(3, os.getpriority(os.PRIO_PROCESS, 0))
        await until(lambda: os.getpriority(os.PRIO_PROCESS, child["pid"]) == nice)  # the child may be the faster of us
        assert child["group"] == child["pid"]
        assert child["arguments"] == [
            *(str(bench.folder / "fp16.onnx"), "--plan-cache", str(bench.folder / "plans")),
            *("--library", "tensorrt", "--for", "portable"),
            *("--precision", "fp16", "--batch-sizes", "1,8", "--hardware-compatibility", "none"),
            *("--time-limit-s", "100", "--json-progress", "--workspace-mb", "512", "--beside-mb", "700"),
        ]
        building.cancel()
        with pytest.raises(asyncio.CancelledError):
            await building
        assert not is_running(child["pid"]), "the child goes with the core"

    asyncio.run(scenario())


@pytest.mark.parametrize("turns", range(8))
def test_whoever_cancels_while_the_child_is_being_started_leaves_none(bench: Bench, turns: int) -> None:
    """After so many turns of the loop, in each of which the start is elsewhere."""

    async def scenario() -> None:
        building = asyncio.ensure_future(
            bench.builder(["wait", str(bench.fifo)]).build(bench.order(), bench.heard.append)
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        building.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(building, 60)

    others = children()  # of other tests, and for good
    asyncio.run(scenario())
    assert set(children()) <= set(others)


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


@pytest.mark.parametrize(
    ("steps", "reason", "refused"),
    [
        ([event("failed", "the graph has an unknown layer"), ["complain", "Traceback"], ["end", 1]], "unknown", False),
        ([event("failed", "why"), ["end", 2]], "why", False),
        ([event("failed", "why"), ["end", 3]], "why", True),  # only what the library refuses counts against the file
        ([["complain", "ModuleNotFoundError: tensorrt"], ["complain", ""], ["end", 1]], "code 1: ModuleNotF", False),
        ([["die", 11]], "signal 11", False),
        ([["end", 0]], "exited with code 0", False),
        ([["babble", 1 << 21], ["end", 0]], "wrote a line of more than", False),
    ],
)
def test_a_build_that_fails_says_why_and_raises_nothing(bench: Bench, steps: list, reason: str, refused: bool) -> None:
    ended = asyncio.run(bench.build(*steps))
    assert (ended.state, ended.refused) == ("failed", refused)
    assert reason in (ended.reason or "")


def test_a_builder_that_cannot_be_started_is_a_failed_build(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = PlanBuilder(command=("/no/such/program",))
    for reason in ("/no/such/program", "no GPU 0"):
        ended = asyncio.run(builder.build(bench.order(), bench.heard.append))
        assert ended.state == "failed"
        assert reason in (ended.reason or "")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize("quiet", [[], [["silence"]]])
def test_a_child_that_does_not_end_in_its_time_is_killed(bench: Bench, quiet: list) -> None:
    async def scenario() -> None:
        steps = (event("progress", "Tuning", step=1, total=9), ["tell", str(bench.about_child())], *quiet)
        building = asyncio.ensure_future(bench.build(*steps, ["wait", str(bench.fifo)]))
        child = await bench.child()
        await bench.pass_s(109)
        await bench.pass_s(0.5)
        assert not building.done()
        await bench.pass_s(1)
        ended = await building
        assert (ended.state, ended.phase) == ("failed", "Tuning")
        assert "within 100 s" in (ended.reason or "")
        assert ended.elapsed_s == 110.5
        assert not is_running(child["pid"])

    asyncio.run(scenario())


def test_a_child_that_eats_the_memory_is_killed(bench: Bench) -> None:
    async def scenario() -> None:
        steps = (["tell", str(bench.about_child())], ["wait", str(bench.fifo)])
        building = asyncio.ensure_future(bench.build(*steps))
        child = await bench.child()
        bench.used_bytes = bench.limits.memory_bytes
        await bench.pass_s(1)
        bench.used_bytes += 1
        await bench.pass_s(1)
        ended = await building
        assert ended.state == "failed"
        assert "the 16384 MiB allowed" in (ended.reason or "")
        assert not is_running(child["pid"])

    asyncio.run(scenario())


def test_one_plan_at_a_time_is_built_on_a_gpu_and_another_gpu_does_not_wait(bench: Bench) -> None:
    async def scenario() -> None:
        builder = bench.builder(["tell", str(bench.about_child())], ["wait", str(bench.fifo)])
        heard: list[list[PlanBuild]] = [[], [], []]
        builds = [
            asyncio.ensure_future(builder.build(bench.order(gpu), heard[number].append))
            for number, gpu in enumerate((0, 0, 1))
        ]
        await until(lambda: heard[0][-1:] == heard[2][-1:] == [PlanBuild("building")])
        assert heard[1] == [PlanBuild("waiting")]
        builds[0].cancel()
        await until(lambda: heard[1][-1].state == "building")
        for build in builds:
            build.cancel()
        await asyncio.gather(*builds, return_exceptions=True)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("gpu", "current", "expected"),
    [(0, None, "0"), (3, None, "3"), (1, "5, 2", "2"), (0, "GPU-0a,GPU-1b", "GPU-0a"), (0, "MIG-1", "MIG-1")],
)
def test_the_gpu_is_counted_among_those_that_this_process_sees(gpu: int, current: str | None, expected: str) -> None:
    assert visible_device(gpu, current) == expected
