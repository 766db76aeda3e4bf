"""The routes that do not infer: health, metadata, configuration, statistics, metrics, pages.

Plain FastAPI: they are called rarely, and FastAPI documents them.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import orjson
from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse, PlainTextResponse

from convoy.app.edge.http.error_docs import ERRORS
from convoy.app.edge.oip import documents
from convoy.app.edge.oip.lookup import find_served
from convoy.app.edge.oip.model_config import model_config
from convoy.app.submission.listing import WHOLE_MODEL, Listing
from convoy.app.submission.management import ManagedCore, ManagedVersion
from convoy.app.telemetry.observed import ObservedEngine
from convoy.app.telemetry.statistics import STAGES
from convoy.app.version import VERSION
from convoy.models.plans import PlanBuild

_PAGE = Path(__file__).with_name("page.html")
_Json = dict[str, Any]


def control_routes(core: ManagedCore, server_name: str) -> APIRouter:
    """Every route that does not infer."""
    router = APIRouter()
    _add_health(router, core)
    _add_statistics(router, core)  # before the metadata, whose `/v2/models/{model}` would take `stats` for a name
    _add_metadata(router, core, server_name)
    _add_pages(router, core)
    return router


def _add_health(router: APIRouter, core: ManagedCore) -> None:
    def verdict(is_well: bool, document: _Json) -> Response:
        if is_well:
            return _json(document)
        return _json({"error": core.not_ready_reason()}, status=503, headers={"Retry-After": "1"})

    @router.get("/v2/health/live", tags=["health"], summary="Whether the process runs", responses=ERRORS)
    async def live() -> Response:
        return _json({"live": True})

    @router.get("/v2/health/ready", tags=["health"], summary="Whether requests are answered", responses=ERRORS)
    async def ready() -> Response:
        return verdict(core.ready, {"ready": True})

    @router.get("/ping", tags=["health"], summary="Ready, in TorchServe's words", responses=ERRORS)
    async def ping() -> Response:
        return verdict(core.ready, {"status": "Healthy"})

    @router.get("/v2/models/{model}/ready", tags=["health"], summary="Whether a model is ready", responses=ERRORS)
    @router.get("/v2/models/{model}/versions/{version}/ready", tags=["health"], responses=ERRORS)
    async def model_ready(model: str, version: str | None = None) -> Response:
        served = find_served(core.catalog, model, version)
        if served.ready and not core.leaving:
            return _json({"name": model, "ready": True})
        return _json({"error": "Model version not ready"}, status=503, headers={"Retry-After": "1"})


def _add_metadata(router: APIRouter, core: ManagedCore, server_name: str) -> None:
    @router.get("/v2", tags=["metadata"], summary="The server and its extensions", responses=ERRORS)
    @router.get("/v2/", include_in_schema=False)
    async def server() -> Response:
        return _json(documents.server_metadata(core, server_name))

    @router.get("/v2/models/{model}", tags=["metadata"], summary="A model's tensors", responses=ERRORS)
    @router.get("/v2/models/{model}/versions/{version}", tags=["metadata"], responses=ERRORS)
    async def metadata(model: str, version: str | None = None) -> Response:
        return _json(documents.model_metadata(core, model, version))

    @router.get("/v2/models/{model}/config", tags=["metadata"], summary="Triton's ModelConfig", responses=ERRORS)
    @router.get("/v2/models/{model}/versions/{version}/config", tags=["metadata"], responses=ERRORS)
    async def config(model: str, version: str | None = None) -> Response:
        return _json(model_config(find_served(core.catalog, model, version)))


def _add_statistics(router: APIRouter, core: ManagedCore) -> None:
    @router.get("/v2/models/stats", tags=["statistics"], summary="Counters of every model", responses=ERRORS)
    async def all_statistics() -> Response:
        return _json(documents.model_statistics(core, None, None))

    @router.get("/v2/models/{model}/stats", tags=["statistics"], summary="A model's counters", responses=ERRORS)
    @router.get("/v2/models/{model}/versions/{version}/stats", tags=["statistics"], responses=ERRORS)
    async def model_statistics(model: str, version: str | None = None) -> Response:
        return _json(documents.model_statistics(core, model, version))

    @router.get("/metrics", tags=["statistics"], summary="Prometheus metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(core.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/stats", tags=["statistics"], summary="The last minute, for people", responses=ERRORS)
    async def stats() -> Response:
        return _json(
            {
                "version": VERSION,
                "ready": core.ready,
                "uptime_s": round(time.monotonic() - core.started_s, 1),
                "inflight_bytes": core.inflight_bytes,
                "unfinished_requests": core.scheduler.unfinished,
                "models": [_last_minute(core, served) for served in core.catalog.served()],
                "gpus": [dataclasses.asdict(reading) for reading in core.gpus.readings],
                "refused": [_refused(one) for one in core.catalog.refused()],
            }
        )


def _add_pages(router: APIRouter, core: ManagedCore) -> None:
    @router.get("/", tags=["pages"], summary="A page for people", response_class=HTMLResponse)
    async def page() -> Response:
        return HTMLResponse(_PAGE.read_text())


def _last_minute(core: ManagedCore, served: ManagedVersion) -> _Json:
    rolling = served.statistics.rolling
    requests_per_s, samples_per_s = rolling.per_second()
    first, *_ = engines = [_engine(served, proved) for proved in served.loaded.engines]
    return {
        "name": served.key.model,
        "version": str(served.key.version),
        "ready": served.ready,
        "takes_images": served.spec.image is not None,
        "published_although": list(served.loaded.objections),
        **first,
        "engines": engines,
        "plan_build": _plan_build(served.plan_build),
        "why_not_others": list(served.loaded.skipped),
        "max_batch_size": served.spec.max_batch_size,
        "waiting_samples": core.scheduler.waiting_samples(served.key),
        "requests_per_s": round(requests_per_s, 2),
        "samples_per_s": round(samples_per_s, 2),
        "stages": {stage: dataclasses.asdict(rolling.percentiles(stage)) for stage in STAGES},
        "batch_sizes": {str(size): times for size, times in rolling.batch_sizes().items()},
    }


def _engine(served: ManagedVersion, engine: ObservedEngine) -> _Json:
    info = engine.info
    return {
        "engine": info.engine,
        "precision": info.precision,
        "device": info.device_fingerprint,
        "device_id": info.device,
        "why": engine.reason,
    }


def _plan_build(build: PlanBuild | None) -> _Json | None:
    """How far the plan is that will serve better; null where none is being built, or ever was."""
    if build is None:
        return None
    return dataclasses.asdict(build) | {"plan": None if build.plan is None else build.plan.name}


def _refused(one: Listing) -> _Json:
    """`version` is null where it is the model's folder that cannot be read."""
    version = None if one.version == WHOLE_MODEL else one.version
    return dataclasses.asdict(one) | {"version": version, "state": one.state.value}


def _json(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(document), status, headers, "application/json")
