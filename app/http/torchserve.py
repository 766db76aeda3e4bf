"""What TorchServe's management API tells about models, for scripts that were written for it.

`/ping` and `/predictions` are elsewhere; docs/torchserve.md says what differs.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Query, Response

from convoy.app.calls.call import find_served
from convoy.app.core import Core
from convoy.app.http.error_docs import ERRORS
from convoy.app.http.replies import json_response
from convoy.app.lifecycle.catalog import Served


def torchserve_routes(core: Core) -> APIRouter:
    router = APIRouter(tags=["TorchServe"], responses=ERRORS)

    @router.get("/models", summary="The models' names")
    async def models(
        limit: int = Query(100, ge=1, le=10_000), next_page_token: int = Query(0, ge=0, le=1 << 31)
    ) -> Response:
        names = sorted({served.key.model for served in core.catalog.served()})
        page = names[next_page_token : next_page_token + limit]
        document: dict[str, Any] = {"models": [{"modelName": name, "modelUrl": _url(name)} for name in page]}
        if next_page_token + limit < len(names):
            document["nextPageToken"] = str(next_page_token + limit)
        return json_response(document)

    @router.get("/models/{model}", summary="The version of a model that is served")
    @router.get("/models/{model}/{version}", summary="One version of a model, or `all`")
    async def describe(model: str, version: str | None = None) -> Response:
        if version == "all":
            find_served(core.catalog, model, None)
            chosen = core.catalog.versions(model)
        else:
            chosen = [find_served(core.catalog, model, version)]
        return json_response([_description(core, served) for served in chosen])

    return router


def _description(core: Core, served: Served) -> dict[str, Any]:
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
    """Where the model is described here; TorchServe names the archive that it was loaded from."""
    return f"/v2/models/{name}"
