"""The routes of the shared memory extensions: system shared memory where it is allowed, CUDA's never."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from convoy.app.core import Core
from convoy.app.edge.http.error_docs import ERRORS
from convoy.app.edge.http.own_pages import OwnPages
from convoy.app.edge.http.replies import json_response
from convoy.app.edge.http.small_body import read_object
from convoy.app.edge.oip import documents
from convoy.app.edge.oip.tensors import brief
from convoy.app.edge.options import BodyLimits
from convoy.models.errors import InvalidRequest, Unsupported

_EXAMPLE = '{"key": "/input", "offset": 0, "byte_size": 128}'
_SYSTEM, _CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"


def shared_memory_routes(core: Core, own_pages: OwnPages, limits: BodyLimits) -> APIRouter:
    router = APIRouter(tags=["shared memory"], responses=ERRORS)
    _add_system(router, core, own_pages, limits)
    _add_cuda(router)
    return router


def _add_system(router: APIRouter, core: Core, own_pages: OwnPages, limits: BodyLimits) -> None:
    @router.get(f"{_SYSTEM}/status", summary="All registered regions")
    @router.get(f"{_SYSTEM}/region/{{name}}/status", summary="One registered region")
    async def status(name: str | None = None) -> Response:
        return json_response(documents.regions(core.shared_memory.status(name)))

    @router.post(
        f"{_SYSTEM}/region/{{name}}/register", summary="Register a shared memory object", response_class=Response
    )
    async def register(name: str, request: Request) -> Response:
        core.shared_memory.check_allowed()
        own_pages.check(request.headers)
        body = await read_object(request, _EXAMPLE, limits)
        key, offset, byte_size = body.get("key"), body.get("offset", 0), body.get("byte_size")
        if not isinstance(key, str) or type(offset) is not int or type(byte_size) is not int:
            raise InvalidRequest(f"the body must be like {_EXAMPLE}, got {brief(body)}")
        core.shared_memory.register(name, key, offset, byte_size)
        return Response()

    @router.post(f"{_SYSTEM}/unregister", summary="Forget all regions", response_class=Response)
    @router.post(f"{_SYSTEM}/region/{{name}}/unregister", summary="Forget a region", response_class=Response)
    async def unregister(request: Request, name: str | None = None) -> Response:
        own_pages.check(request.headers)
        core.shared_memory.unregister(name)
        return Response()


def _add_cuda(router: APIRouter) -> None:
    @router.get(f"{_CUDA}/status", summary="No region: CUDA shared memory is not offered")
    async def status() -> Response:
        return json_response([])

    @router.get(f"{_CUDA}/region/{{name}}/status", summary="Not found: CUDA shared memory is not offered")
    async def status_of_one(name: str) -> Response:
        raise documents.no_cuda_region(name)

    @router.post(f"{_CUDA}/region/{{name}}/register", summary="Not offered")
    async def register(name: str) -> Response:
        raise Unsupported(documents.CUDA_IS_NOT_OFFERED)

    # Clients tidy up all regions before they begin; that there are none is no error.
    @router.post(f"{_CUDA}/unregister", summary="Forget all regions, of which there are none", response_class=Response)
    @router.post(
        f"{_CUDA}/region/{{name}}/unregister", summary="Forget a region, which is not there", response_class=Response
    )
    async def unregister(name: str | None = None) -> Response:
        return Response()
