"""The routes that do not infer: health, metadata, configuration, statistics, metrics, pages.

Plain FastAPI: they are called rarely, and FastAPI documents them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse

from convoy.app.calls.access import ServeOptions
from convoy.app.calls.call import find_served
from convoy.app.core import Core
from convoy.app.http.examples import ERRORS
from convoy.app.http.pages import page_response, report_response
from convoy.app.http.replies import json_response
from convoy.app.lifecycle.catalog import WHOLE_MODEL, Listing, ModelState, Served
from convoy.app.lifecycle.served_metrics import shapes_of
from convoy.app.loading.proving import ProvedEngine
from convoy.app.pictures.answering import why_no_predictions
from convoy.app.protocol import documents
from convoy.app.protocol.documents import model_config
from convoy.app.telemetry.host import host_usage
from convoy.app.version import VERSION
from convoy.models.errors import Draining, NotFound, NotReady, Unsupported
from convoy.models.plans import PlanBuild

# Extensions that clients may ask for, and why they are not offered.
NOT_OFFERED = {
    "/v2/trace/setting": "the server does not support tracing; /stats and the Server-Timing header tell the stages",
    "/v2/models/{model}/trace/setting": "the server does not support tracing; see /stats and Server-Timing",
    "/v2/models/{model}/versions/{version}/trace/setting": (
        "the server does not support tracing; see /stats and Server-Timing"
    ),
    "/v2/logging": "the server does not support dynamic logging; start it with --log-level or --access-log",
}


def not_offered_routes() -> APIRouter:
    """The extensions of the protocol that this server does not have. Not documented."""
    router = APIRouter(include_in_schema=False)
    for path, why in NOT_OFFERED.items():
        router.add_api_route(path, _refusal(why), methods=["GET", "POST"])
    return router


def _refusal(why: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        raise Unsupported(why)

    return refuse


_Json = dict[str, Any]


_ON_THE_WAY = (ModelState.LOADING, ModelState.UNLOADING)
_HISTORY = "Names of models whose last five minutes are told, too"


def control_routes(core: Core, options: ServeOptions) -> APIRouter:
    """Every route that does not infer."""
    router = APIRouter()
    _add_health(router, core)
    _add_statistics(
        router, core, options
    )  # before the metadata, whose `/v2/models/{model}` would take `stats` as a name
    _add_metadata(router, core, options.server_name)

    @router.get("/", tags=["Page"], summary="The page of the server", response_class=HTMLResponse)
    async def own_page() -> Response:
        return page_response()

    @router.get("/reports/{model}", include_in_schema=False)
    @router.get("/reports/{model}/{version}", include_in_schema=False)
    async def report(model: str, version: str | None = None) -> Response:
        loaded = find_served(core.catalog, model, version).loaded
        if loaded.report is None:
            raise NotFound("this version has no report; export the model with Convoy to get one")
        try:
            return report_response(await asyncio.to_thread(loaded.report.read_bytes))
        except OSError as error:
            raise NotFound(f"the report of this version cannot be read ({error.strerror})") from error

    return router


def _add_health(router: APIRouter, core: Core) -> None:
    def verdict(document: _Json, problem: str) -> Response:
        if problem:
            raise (Draining if core.leaving else NotReady)(f"{problem}; ask again later")
        return json_response(document)

    @router.get("/v2/health/live", tags=["Health"], summary="Liveness", responses=ERRORS)
    async def live() -> Response:
        return json_response({"live": True})

    @router.get("/v2/health/ready", tags=["Health"], summary="Readiness", responses=ERRORS)
    async def ready() -> Response:
        return verdict({"ready": True}, core.not_ready_reason())

    @router.get("/ping", tags=["Health"], summary="Readiness, in TorchServe's format", responses=ERRORS)
    async def ping() -> Response:
        return verdict({"status": "Healthy"}, core.not_ready_reason())

    @router.get("/v2/models/{model}/ready", tags=["Health"], summary="Readiness of a model", responses=ERRORS)
    @router.get(
        "/v2/models/{model}/versions/{version}/ready",
        tags=["Health"],
        summary="Readiness of a version",
        responses=ERRORS,
    )
    async def model_ready(model: str, version: str | None = None) -> Response:
        served = find_served(core.catalog, model, version)
        is_ready = served.ready and not core.leaving
        return verdict({"name": model, "ready": True}, "" if is_ready else "Model version not ready")


def _add_metadata(router: APIRouter, core: Core, server_name: str) -> None:
    @router.get("/v2", tags=["Metadata"], summary="The server's name, version and extensions", responses=ERRORS)
    @router.get("/v2/", include_in_schema=False)
    async def server() -> Response:
        return json_response(documents.server_metadata(core, server_name))

    @router.get("/v2/models/{model}", tags=["Metadata"], summary="A model's inputs and outputs", responses=ERRORS)
    @router.get(
        "/v2/models/{model}/versions/{version}",
        tags=["Metadata"],
        summary="A version's inputs and outputs",
        responses=ERRORS,
    )
    async def metadata(model: str, version: str | None = None) -> Response:
        return json_response(documents.model_metadata(core, model, version))

    @router.get(
        "/v2/models/{model}/config",
        tags=["Metadata"],
        summary="A model's configuration, in Triton's format",
        responses=ERRORS,
    )
    @router.get(
        "/v2/models/{model}/versions/{version}/config",
        tags=["Metadata"],
        summary="A version's configuration, in Triton's format",
        responses=ERRORS,
    )
    async def config(model: str, version: str | None = None) -> Response:
        return json_response(model_config(find_served(core.catalog, model, version), core.control.policy_of(model)))


def _add_statistics(router: APIRouter, core: Core, options: ServeOptions) -> None:
    @router.get("/v2/models/stats", tags=["Statistics"], summary="Statistics of all models", responses=ERRORS)
    async def all_statistics() -> Response:
        return json_response(documents.model_statistics(core, None, None))

    @router.get("/v2/models/{model}/stats", tags=["Statistics"], summary="Statistics of a model", responses=ERRORS)
    @router.get(
        "/v2/models/{model}/versions/{version}/stats",
        tags=["Statistics"],
        summary="Statistics of a version",
        responses=ERRORS,
    )
    async def model_statistics(model: str, version: str | None = None) -> Response:
        return json_response(documents.model_statistics(core, model, version))

    @router.get("/metrics", tags=["Statistics"], summary="Prometheus metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        text, content_type = core.metrics.render_for(request.headers.get("accept", ""))
        return Response(text, media_type=content_type)

    @router.get(
        "/stats", tags=["Statistics"], summary="Requests, latencies and devices in the last minute", responses=ERRORS
    )
    async def stats(history: Annotated[tuple[str, ...], Query(description=_HISTORY)] = ()) -> Response:
        return json_response(
            {
                "version": VERSION,
                "ready": core.ready,
                "model_control": core.control.mode,
                "changes": _changes(core, options),
                "uptime_s": round(time.monotonic() - core.started_s, 1),
                "inflight_bytes": core.slab.used_bytes,
                "open_calls": core.open_calls,
                "waiting_to_decode": core.waiting_to_decode(),
                "unfinished_requests": core.scheduler.unfinished,
                "refused_per_s": _rounded(core.metrics.refusals().per_second()),
                "calls_for_no_model_per_s": _rounded(core.metrics.strangers().per_second()),
                "devices": _devices(core),
                "host": host_usage(),
                "models": [
                    _last_minute(core, served) | (_five_minutes(served) if served.key.model in history else {})
                    for served in core.catalog.served()
                ],
                "gpus": [dataclasses.asdict(reading) for reading in core.gpus.readings],
                "on_the_way": [_listed(one) for one in core.catalog.index() if one.state in _ON_THE_WAY],
                "refused": [_listed(one) for one in core.catalog.refused()],
            }
        )

    @router.get("/store", tags=["Statistics"], summary="All models and versions in the store", responses=ERRORS)
    async def store() -> Response:
        found = await core.control.versions_in_store()
        models = [{"name": name, "versions": [str(one) for one in versions]} for name, versions in found.items()]
        return json_response({"models": models})


def _changes(core: Core, options: ServeOptions) -> str:
    """Whether loading and unloading is open, needs the admin token, or is off."""
    if core.control.mode != "explicit":
        return "not_allowed"
    if options.admin_token is not None:
        return "with_token"
    return "without_token" if options.is_loopback else "not_allowed"


def _last_minute(core: Core, served: Served) -> _Json:
    last_minute = served.statistics.last_minute
    requests_per_s, samples_per_s = last_minute.per_second()
    first, *_ = engines = [_engine(engine) for engine in served.loaded.engines]
    shapes = shapes_of(served.loaded.engines)  # memory kept for dynamic sizes; none if sizes are fixed
    return {
        "name": served.key.model,
        "version": str(served.key.version),
        "ready": served.ready,
        "task": served.spec.task,
        "takes_images": why_no_predictions(served.spec) is None,
        "published_although": list(served.loaded.objections),
        "has_report": served.loaded.report is not None,
        **first,
        "engines": engines,
        "shapes": None if shapes is None else dataclasses.asdict(shapes),
        "plan_build": _plan_build(served.plan_build),
        "why_not_others": list(served.loaded.skipped),
        "max_batch_size": served.spec.max_batch_size,
        "open_calls": served.users,
        "waiting_samples": core.scheduler.waiting_samples(served.key),
        "calls_per_s": _rounded(served.statistics.calls.per_second()),
        "refused_per_s": _rounded(served.statistics.refusals.per_second()),
        "requests_per_s": round(requests_per_s, 2),
        "samples_per_s": round(samples_per_s, 2),
        "stages": {stage: dataclasses.asdict(one) for stage, one in last_minute.stages().items()},
        "mean_ms": last_minute.means_ms(),
        "batch_sizes": {str(size): times for size, times in last_minute.batch_sizes().items()},
    }


def _five_minutes(served: Served) -> _Json:
    """Lists with a figure for each ended period, the latest last; shorter for a younger version."""
    statistics = served.statistics
    span = statistics.last_minute.span()
    periods = statistics.last_minute.history(span)
    runs = [{} if one is None else one.batches for one in periods]
    batch_sizes = sum((Counter(batches) for batches in runs), Counter[int]())
    return {
        "history": {
            "period_s": span.period_s,
            "until_s_ago": round(span.until_s_ago, 3),
            "calls_per_s": _rounded_lists(statistics.calls.history(span)),
            "refused_per_s": _rounded_lists(statistics.refusals.history(span)),
            "total": {
                name: [None if one is None else getattr(one.total, name) for one in periods]
                for name in ("p50_ms", "p95_ms", "p99_ms")
            },
            "mean_batch": [_mean_batch(batches) for batches in runs],
            "largest_batch": [max(batches, default=None) for batches in runs],
            "batch_sizes": {str(size): batch_sizes[size] for size in sorted(batch_sizes)},
        }
    }


def _mean_batch(batches: dict[int, int]) -> float | None:
    samples = sum(size * times for size, times in batches.items())
    return round(samples / sum(batches.values()), 2) if batches else None


def _rounded_lists(rates: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [round(rate, 2) for rate in found] for name, found in rates.items()}


def _devices(core: Core) -> list[_Json]:
    """Compute seconds per second; above 1 if batches run side by side."""
    used = core.metrics.computed_ns().per_second()
    loaded = {engine.info.device for served in core.catalog.served() for engine in served.loaded.engines}
    return [{"device": one, "utilisation": round(used.get(one, 0.0) / 1e9, 4)} for one in sorted({*loaded, *used})]


def _rounded(rates: dict[str, float]) -> dict[str, float]:
    return {name: round(rate, 2) for name, rate in rates.items()}


def _engine(engine: ProvedEngine) -> _Json:
    info, accuracy = engine.info, engine.accuracy
    return {
        "engine": info.engine,
        "precision": info.precision,
        "device": info.device_fingerprint,
        "device_id": info.device,
        "why": engine.reason,
        "accuracy": accuracy and {"metric": accuracy.metric, "score": accuracy.in_words, "samples": accuracy.images},
    }


def _plan_build(build: PlanBuild | None) -> _Json | None:
    """The progress of the plan that will serve better; null if none is being built, or ever was."""
    if build is None:
        return None
    return dataclasses.asdict(build) | {"plan": None if build.plan is None else build.plan.name}


def _listed(one: Listing) -> _Json:
    """`version` is null if the model's folder cannot be read."""
    version = None if one.version == WHOLE_MODEL else str(one.version)
    return dataclasses.asdict(one) | {"version": version, "state": one.state.value}


def torchserve_routes(core: Core) -> APIRouter:
    """TorchServe's management API for models; docs/torchserve.md lists the differences."""
    router = APIRouter(tags=["TorchServe"], responses=ERRORS)

    @router.get("/models", summary="List models")
    async def models(
        limit: int = Query(100, ge=1, le=10_000), next_page_token: int = Query(0, ge=0, le=1 << 31)
    ) -> Response:
        names = sorted({served.key.model for served in core.catalog.served()})
        page = names[next_page_token : next_page_token + limit]
        document: _Json = {"models": [{"modelName": name, "modelUrl": _url(name)} for name in page]}
        if next_page_token + limit < len(names):
            document["nextPageToken"] = str(next_page_token + limit)
        return json_response(document)

    @router.get("/models/{model}", summary="The served version of a model")
    @router.get("/models/{model}/{version}", summary="One version of a model, or all")
    async def describe(model: str, version: str | None = None) -> Response:
        if version == "all":
            find_served(core.catalog, model, None)
            chosen = core.catalog.versions(model)
        else:
            chosen = [find_served(core.catalog, model, version)]
        return json_response([_description(core, served) for served in chosen])

    return router


def _description(core: Core, served: Served) -> _Json:
    waiting = core.scheduler.waiting_samples(served.key)
    engines = [engine.info for engine in served.loaded.engines]
    status = "READY" if served.ready else "UNLOADING"
    return {
        "modelName": served.key.model,
        "modelVersion": str(served.key.version),
        "modelUrl": _url(served.key.model),
        "runtime": engines[0].engine,
        "minWorkers": len(engines),
        "maxWorkers": len(engines),
        "batchSize": max(1, served.spec.max_batch_size),
        "maxBatchDelay": 0,
        "loadedAtStartup": True,
        "workers": [
            {"id": str(number), "status": status, "gpu": not info.is_on_cpu} for number, info in enumerate(engines)
        ],
        "jobQueueStatus": {
            "remainingCapacity": max(0, core.max_waiting(served.key) - waiting),
            "pendingRequests": waiting,
        },
    }


def _url(name: str) -> str:
    """Where the model is described here; TorchServe has the archive's name."""
    return f"/v2/models/{name}"
