"""No cold start: a version serves at once with what exists, and moves to a faster engine when that is ready.

The plans that loading asked for are built one after the other in child processes, or compiled for the device. A
finished one proves itself beside the serving engine, on the bundle's canary, and takes over between two batches if it
is faster. ONNX Runtime is tuned in the same way, because tuning would take too long at the start. A failure is reported
in `/stats` and in the log, and serving continues.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from convoy.app.engines.base import Engine
from convoy.app.engines.batch import EngineFailure
from convoy.app.engines.cuda.device import Device
from convoy.app.engines.jobs import Job, NotProved, Place, PlanRequest, TuningCandidate, refusal
from convoy.app.engines.measure import Rounds
from convoy.app.engines.onnxruntime_tuned import open_tuned
from convoy.app.engines.plan_builder import BuildOrder, PlanBuilder
from convoy.app.engines.plans import PlanOpener
from convoy.app.engines.tensorrt_library import library_named
from convoy.app.lifecycle.catalog import Served
from convoy.app.lifecycle.tasks import Tasks, to_its_end
from convoy.app.loading.proving import NOTHING_SERVES, ProvedEngine, choose, fastest, open_and_prove, prove, race
from convoy.app.scheduling.queues import Lane
from convoy.app.scheduling.request import ModelKey
from convoy.app.telemetry.metrics import Metrics, PlanResult
from convoy.models.bundle import Variant, open_bundle
from convoy.models.errors import JobError
from convoy.models.plan_cache import find_plan
from convoy.models.plans import NoPlan, Plan, PlanBuild, PlanKey

_log = logging.getLogger("convoy")


def prove_plan(job: Job, wish: PlanRequest) -> ProvedEngine:
    """The engine of a plan that was just built, or is compiled now. Raises NotProved."""
    assert job.plan_cache is not None  # otherwise nothing is requested
    found = find_plan(job.plan_cache, wish.key)
    if isinstance(found, NoPlan):
        raise NotProved(f"{wish.variant.file}: {found.reason}")
    return _proved(job, wish.variant, PlanOpener(job, wish.device, found).open, "its plan was built")


def prove_tuned(job: Job, untried: TuningCandidate) -> ProvedEngine:
    """ONNX Runtime with its best settings. Raises NotProved."""
    variant, place = untried.variant, Place(untried.device)
    return _proved(job, variant, partial(open_tuned, job, variant, place), "tuned, and faster than any plan")


def _proved(job: Job, variant: Variant, open_engine: Callable[[], Engine], why: str) -> ProvedEngine:
    assert job.canary is not None  # for a model without a canary, nothing is left for later
    reason, runs = f"{variant.file}: {why}", job.warm_up_runs
    prove_engine = partial(prove, variant, job.canary, reason, warm_up_runs=runs)
    candidate = open_and_prove(variant, open_engine, prove_engine)
    return choose([candidate], [])


def still_refused(skipped: tuple[str, ...], wish: PlanRequest) -> tuple[str, ...]:
    """The reasons that still hold after the request was tried: there was no plan, and now there is an answer."""
    device = wish.device.name
    of_file, of_all = (refusal(wish.library, device, why) for why in (f"{wish.variant.file}: ", NOTHING_SERVES))
    return tuple(reason for reason in skipped if not reason.startswith(of_file) and reason != of_all)


class Upgrades:
    """The plans being built for one core."""

    def __init__(
        self,
        builder: PlanBuilder,
        probe: Callable[[Lane, Callable[[], None]], Awaitable[None]],
        swap: Callable[[Served, ProvedEngine], Awaitable[bool]],
        tasks: Tasks,
        metrics: Metrics,
    ) -> None:
        """`probe` runs a function in a lane's thread, and `swap` lets an engine take over, as in `Lanes`."""
        self._builder, self._probe, self._swap, self._tasks, self._metrics = builder, probe, swap, tasks, metrics
        self._at_work: set[ModelKey] = set()
        self._building: dict[ModelKey, asyncio.Task[PlanBuild]] = {}

    def begin(self, served: Served) -> None:
        """Build what the version lacks, if anything; if called again, also what it lacks since then."""
        if (served.loaded.wishes or served.loaded.untried) and served.key not in self._at_work:
            self._at_work.add(served.key)
            self._tasks.spawn(self._upgrade(served))

    def end(self, served: Served) -> None:
        """Stop for a withdrawn version: others may need the builder and the device's memory."""
        if served.key in self._building:
            self._building[served.key].cancel()

    async def _upgrade(self, served: Served) -> None:
        failed: set[tuple[str, PlanKey]] = set()
        try:
            # Determined anew each time: while one plan is built, an engine may be lost and the version loaded again.
            while not served.withdrawn:
                left = [one for one in served.loaded.wishes if (one.device.name, one.key) not in failed]
                if left:
                    failed |= {(one.device.name, one.key) for one in await self._fulfil(served, left[0])}
                elif served.loaded.untried:
                    await self._try(served, untried := served.loaded.untried[0])
                    others = tuple(one for one in served.loaded.untried if one != untried)
                    served.loaded = replace(served.loaded, untried=others)
                else:
                    return
        finally:
            self._at_work.discard(served.key)

    async def _fulfil(self, served: Served, wish: PlanRequest) -> list[PlanRequest]:
        """Which requests failed. Whatever goes wrong, the version is served as before, and the next one is tried."""
        if _is_served(served, wish):
            _fulfilled(served, wish)  # it took over while the version was loaded again
            return []
        tried = [wish]
        result: PlanResult
        try:
            await self._move_to_plan(served, wish)
            return []
        except _NotBuilt as failure:
            result, reason = "not_built", str(failure)
            # On the GPU itself a build may only lack memory; elsewhere the same build would fail again.
            if library_named(wish.library).builds_anywhere:
                tried += [one for one in served.loaded.wishes if one != wish and one.key == wish.key]
        except (NotProved, JobError) as failure:
            result, reason = "not_faster" if isinstance(failure, _NotFaster) else "not_proved", str(failure)
        except Exception as error:  # a bug, here or in a library
            _log.exception("switching %s to its plan failed; this is a bug", wish.onnx)
            result, reason = "not_proved", f"{type(error).__name__}: {error}"
        self._metrics.plan_tried(served, result)
        for one in tried:
            self._give_up(served, one, reason)
        return tried

    async def _move_to_plan(self, served: Served, wish: PlanRequest) -> None:
        """Raises NotProved or JobError."""
        await self._build(served, wish)
        if served.withdrawn:
            return
        serves = await self._let_take_over(served, lambda job: prove_plan(job, wish))
        if serves is None:
            return
        _fulfilled(served, wish)
        self._metrics.plan_tried(served, "serves")
        name, version, device = served.key.model, served.key.version, wish.device.name
        _log.info("%s version %d on %s now runs on %s: %s", name, version, device, wish.library, serves.reason)

    async def _try(self, served: Served, untried: TuningCandidate) -> None:
        """The serving engine may be slower than ONNX Runtime, or be ONNX Runtime untuned; the faster one stays."""
        if served.withdrawn or not any(lane.device == untried.device.name for lane in served.lanes):
            return
        about = f"{untried.variant.file} of {served.key.model} version {served.key.version} on {untried.device.name}"
        try:
            serves = await self._let_take_over(served, lambda job: prove_tuned(job, untried))
        except (NotProved, JobError) as failure:
            _log.info("tuned ONNX Runtime does not replace the current engine for %s: %s", about, failure)
            reason = refusal("onnxruntime-cuda", untried.device.name, _in_file(untried.variant.file, failure))
            others = tuple(one for one in served.loaded.skipped if one != reason)
            served.loaded = replace(served.loaded, skipped=(*others, reason))
        except Exception:  # a bug, here or in a library
            _log.exception("tuning %s failed; this is a bug", about)
        else:
            _log.info("%s: %s", about, serves.reason if serves else "it is no longer served")

    async def _let_take_over(self, served: Served, prove: Callable[[Job], ProvedEngine]) -> ProvedEngine | None:
        """The engine, which serves now; None if the version was withdrawn. Raises NotProved or JobError."""
        # In a thread, because every byte of the bundle and of a plan is hashed.
        proving = asyncio.ensure_future(asyncio.to_thread(lambda: prove(_job(served))))
        try:
            proved = await to_its_end(proving)
            await self._check_pays(served, proved)
        except BaseException:
            if proving.exception() is None:  # also if the core stops meanwhile, close what was opened
                await asyncio.to_thread(proving.result().engine.close)
            raise
        proved = replace(proved, code="fastest_verified")
        return proved if await self._swap(served, proved) else None

    async def _build(self, served: Served, wish: PlanRequest) -> None:
        """Return when the plan exists. Raises NotProved if it cannot be built."""
        plan_cache = served.options.plan_cache
        assert plan_cache is not None  # otherwise nothing is requested
        if isinstance(await asyncio.to_thread(find_plan, plan_cache, wish.key), Plan):
            # Built meanwhile: for another GPU of the same name, another version, or by another server.
            served.plan_build = PlanBuild("built", file=wish.variant.file)
            return

        def report(progress: PlanBuild) -> None:
            served.plan_build = replace(progress, file=wish.variant.file)

        _log.info("building the %s plan of %s for %s in the background", wish.library, wish.onnx, wish.device.name)
        library = library_named(wish.library)
        order = BuildOrder(
            *(wish.onnx, plan_cache, wish.options, wish.device.properties.index),
            library=wish.library,
            # A library that builds on the GPU itself knows its target.
            capabilities=wish.key.target.capabilities if library.builds_anywhere else (),
            beside_mb=None if library.builds_anywhere else await asyncio.to_thread(_workspace_mb, wish.device),
        )
        building = asyncio.ensure_future(self._builder.build(order, report))
        self._building[served.key] = building
        try:
            build = await building
        finally:
            del self._building[served.key]
        if build.state != "built":
            raise _NotBuilt(build.reason or "the builder gave no reason")

    async def _check_pays(self, served: Served, proved: ProvedEngine) -> None:
        """Compare it with the serving engine on the same device, in turns, so both have the same load. Raises
        NotProved.
        """
        rival = next((lane for lane in served.at_work if lane.device == proved.engine.info.device), None)
        if rival is None:
            return
        measured: list[Rounds] = []
        try:
            # In the rival's thread, which bounds how many are in it at once; its other slots continue.
            comparing = self._probe(rival, lambda: measured.extend(race([rival.proved.engine, proved.engine])))
            await to_its_end(comparing)  # before that, neither may be closed
        except EngineFailure as failure:
            raise NotProved(f"it could not be compared with the current engine: {failure}") from failure
        if fastest(measured) == 0:
            info = rival.proved.engine.info
            raise _NotFaster(f"it is not faster than {info.engine} in {info.precision}")

    def _give_up(self, served: Served, wish: PlanRequest, reason: str) -> None:
        """The version is served as before, and `/stats` says why."""
        build = served.plan_build or PlanBuild("failed", file=wish.variant.file)
        served.plan_build = replace(build, reason=reason)
        told = refusal(wish.library, wish.device.name, _in_file(wish.variant.file, reason))
        served.loaded = replace(served.loaded, skipped=(*still_refused(served.loaded.skipped, wish), told))
        _log.warning("%s version %d keeps its current engine: %s", served.key.model, served.key.version, told)


def _workspace_mb(device: Device) -> int:
    """How much of a serving GPU a builder may use. Raises NotProved if the GPU does not answer."""
    try:
        device.use()
        return max(1, min(1 << 30, device.cuda.free_bytes() // 4) >> 20)
    except EngineFailure as failure:
        raise NotProved(f"cannot read the free memory of {device.name}: {failure}") from failure


class _NotBuilt(NotProved):
    """There is no plan, for whichever GPU it was."""


class _NotFaster(NotProved):
    """It is correct, and the serving engine is as fast."""


def _in_file(file: str, reason: object) -> str:
    return f"{file}: {str(reason).removeprefix(f'{file}: ')}"


def _is_served(served: Served, wish: PlanRequest) -> bool:
    infos = [lane.proved.engine.info for lane in served.at_work]
    wanted = (wish.device.name, wish.library, wish.variant.precision)
    return any((info.device, info.engine, info.precision) == wanted for info in infos)


def _fulfilled(served: Served, wish: PlanRequest) -> None:
    """Compares by value, because the version may have been loaded again."""
    wishes = tuple(other for other in served.loaded.wishes if other != wish)
    served.loaded = replace(served.loaded, skipped=still_refused(served.loaded.skipped, wish), wishes=wishes)


def _job(served: Served) -> Job:
    """What the version was loaded from; if signatures are required, the verified copy. Raises JobError."""
    loaded, options = served.loaded, served.options
    bundle = open_bundle((loaded.stored if loaded.copy is None else loaded.copy.stored).folder)
    on = (options.precision, options.machine, options.plan_cache)
    return Job.of_bundle(bundle, served.spec.max_batch_size, *on, warm_up_runs=options.warm_up_runs)
