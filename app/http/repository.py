"""The routes that change what is served, and those of shared memory: the system's if it is allowed, CUDA's never."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from convoy.app.calls.access import Authenticator, BodyLimits, ServeOptions
from convoy.app.core import Core
from convoy.app.http.body import too_slow
from convoy.app.http.browsers import check_own_page
from convoy.app.http.examples import ERRORS
from convoy.app.http.replies import json_response
from convoy.app.protocol import documents
from convoy.app.protocol.repository import check_repository, load_model, unload_model
from convoy.app.protocol.tensors import brief
from convoy.models.errors import BodyTooLarge, InvalidJson, InvalidRequest, Unsupported

_REPOSITORY = "/v2/repository"
_LOAD_EXAMPLE = '{"parameters": {"config": "{\\"max_batch_size\\": 16}"}}'


def repository_routes(core: Core, options: ServeOptions) -> APIRouter:
    router = APIRouter(tags=["Repository"], responses=ERRORS)
    keys, limits = Authenticator(options), options.body

    def check_admin(request: Request) -> None:
        core.control.check_explicit()
        authorization = request.headers.get("authorization")
        keys.check_admin(None if authorization is None else authorization.encode("latin-1"))
        check_own_page(request.headers, options)

    @router.post(f"{_REPOSITORY}/index", summary="List models and versions with their state and reason")
    async def index(request: Request) -> Response:
        only_ready = (await _read_object(request, '{"ready": true}', limits)).get("ready", False)
        if not isinstance(only_ready, bool):
            raise InvalidRequest("'ready' must be true or false")
        return json_response(await documents.repository_index(core, only_ready=only_ready))

    is_explicit = core.control.mode == "explicit"
    load_path, unload_path = f"{_REPOSITORY}/models/{{model}}/load", f"{_REPOSITORY}/models/{{model}}/unload"

    @router.post(load_path, summary="Load a model, or load it again if it changed", include_in_schema=is_explicit)
    async def load(model: str, request: Request) -> Response:
        check_admin(request)
        await load_model(core, model, _parameters(await _read_object(request, _LOAD_EXAMPLE, limits)))
        return Response()

    @router.post(unload_path, summary="Unload every version of a model", include_in_schema=is_explicit)
    async def unload(model: str, request: Request) -> Response:
        check_admin(request)
        await unload_model(core, model, _parameters(await _read_object(request, '{"parameters": {}}', limits)))
        return Response()

    @router.post(f"{_REPOSITORY}/{{repository}}/index", include_in_schema=False)
    @router.post(f"{_REPOSITORY}/{{repository}}/models/{{model}}/load", include_in_schema=False)
    @router.post(f"{_REPOSITORY}/{{repository}}/models/{{model}}/unload", include_in_schema=False)
    async def named(repository: str) -> Response:
        check_repository(repository)
        raise AssertionError("a name in a path is never empty")

    return router


def _parameters(document: Mapping[str, object]) -> Mapping[str, object]:
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidRequest("'parameters' must be an object")
    return parameters


_EXAMPLE = '{"key": "/input", "offset": 0, "byte_size": 128}'
_SYSTEM, _CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"


def shared_memory_routes(core: Core, options: ServeOptions) -> APIRouter:
    is_allowed, limits = core.shared_memory.is_allowed, options.body
    router = APIRouter(tags=["Shared memory"], responses=ERRORS, include_in_schema=is_allowed)

    @router.get(f"{_SYSTEM}/status", summary="List registered regions")
    @router.get(f"{_SYSTEM}/region/{{name}}/status", summary="One registered region")
    async def status(name: str | None = None) -> Response:
        return json_response(documents.regions(core.shared_memory.status(name)))

    @router.post(
        f"{_SYSTEM}/region/{{name}}/register", summary="Register a shared memory object", response_class=Response
    )
    async def register(name: str, request: Request) -> Response:
        core.shared_memory.check_allowed()
        check_own_page(request.headers, options)
        body = await _read_object(request, _EXAMPLE, limits)
        key, offset, byte_size = body.get("key"), body.get("offset", 0), body.get("byte_size")
        if not isinstance(key, str) or type(offset) is not int or type(byte_size) is not int:
            raise InvalidRequest(f"the body must be like {_EXAMPLE}, got {brief(body)}")
        core.shared_memory.register(name, key, offset, byte_size)
        return Response()

    @router.post(f"{_SYSTEM}/unregister", summary="Unregister all regions", response_class=Response)
    @router.post(f"{_SYSTEM}/region/{{name}}/unregister", summary="Unregister a region", response_class=Response)
    async def unregister(request: Request, name: str | None = None) -> Response:
        check_own_page(request.headers, options)
        core.shared_memory.unregister(name)
        return Response()

    return router


def cuda_routes() -> APIRouter:
    """CUDA shared memory, which is not offered, although clients ask for it. Not documented."""
    router = APIRouter(include_in_schema=False)

    @router.get(f"{_CUDA}/status")
    async def status() -> Response:
        return json_response([])

    @router.get(f"{_CUDA}/region/{{name}}/status")
    async def status_of_one(name: str) -> Response:
        raise documents.no_cuda_region(name)

    @router.post(f"{_CUDA}/region/{{name}}/register")
    async def register(name: str) -> Response:
        raise Unsupported(documents.CUDA_IS_NOT_OFFERED)

    # Clients unregister all regions before they begin; an empty set is not an error.
    @router.post(f"{_CUDA}/unregister")
    @router.post(f"{_CUDA}/region/{{name}}/unregister")
    async def unregister(name: str | None = None) -> Response:
        return Response()

    return router


async def _read_object(request: Request, example: str, limits: BodyLimits) -> dict[str, Any]:
    """Parse an object, empty without a body. Raises InvalidRequest, BodyTooLarge or RequestTimeout.

    `example` shows a valid body. The time limits of bodies apply.
    """
    body, begun_s = bytearray(), asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(begun_s + limits.seconds_for(0)) as limit:
            async for chunk in request.stream():
                body += chunk
                if len(body) > 1 << 20:
                    raise BodyTooLarge(f"the body of this route exceeds the maximum of {1 << 20} bytes; send less")
                limit.reschedule(begun_s + limits.seconds_for(len(body)))
    except TimeoutError as error:
        raise too_slow(limits.seconds_for(len(body))) from error
    try:
        document = orjson.loads(bytes(body) or b"{}")
    except orjson.JSONDecodeError as error:
        raise InvalidJson(f"failed to parse the request JSON buffer: {error}; send {example}") from error
    if not isinstance(document, dict):
        raise InvalidRequest(f"the body must be a JSON object such as {example}")
    return document
