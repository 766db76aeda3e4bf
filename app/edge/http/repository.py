"""The routes of the repository extension: what there is, and loading and unloading it.

Loading and unloading change what everybody is answered, so they want the admin token; a server that nobody
else can reach does without, but for other people's web pages.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request, Response

from convoy.app.core import Core
from convoy.app.edge.access import Authenticator
from convoy.app.edge.http.error_docs import ERRORS
from convoy.app.edge.http.own_pages import OwnPages
from convoy.app.edge.http.replies import json_response
from convoy.app.edge.http.small_body import read_object
from convoy.app.edge.oip import documents
from convoy.app.edge.oip.repository import check_repository, load_model, unload_model
from convoy.app.edge.options import BodyLimits
from convoy.models.errors import InvalidRequest

_REPOSITORY = "/v2/repository"
_LOAD_EXAMPLE = '{"parameters": {"config": "{\\"max_batch_size\\": 16}"}}'


def repository_routes(core: Core, keys: Authenticator, own_pages: OwnPages, limits: BodyLimits) -> APIRouter:
    router = APIRouter(tags=["repository"], responses=ERRORS)

    def check_admin(request: Request) -> None:
        core.control.check_explicit()
        authorization = request.headers.get("authorization")
        keys.check_admin(None if authorization is None else authorization.encode("latin-1"))
        own_pages.check(request.headers)

    @router.post(f"{_REPOSITORY}/index", summary="What is served and what not, and why")
    async def index(request: Request) -> Response:
        only_ready = (await read_object(request, '{"ready": true}', limits)).get("ready", False)
        if not isinstance(only_ready, bool):
            raise InvalidRequest("'ready' must be true or false")
        return json_response(await documents.repository_index(core, only_ready=only_ready))

    @router.post(f"{_REPOSITORY}/models/{{model}}/load", summary="Load a model, or load it again if it changed")
    async def load(model: str, request: Request) -> Response:
        check_admin(request)
        await load_model(core, model, _parameters(await read_object(request, _LOAD_EXAMPLE, limits)))
        return Response()

    @router.post(f"{_REPOSITORY}/models/{{model}}/unload", summary="Unload every version of a model")
    async def unload(model: str, request: Request) -> Response:
        check_admin(request)
        await unload_model(core, model, _parameters(await read_object(request, '{"parameters": {}}', limits)))
        return Response()

    @router.post(f"{_REPOSITORY}/{{repository}}/index", summary="Not offered")
    @router.post(f"{_REPOSITORY}/{{repository}}/models/{{model}}/load", summary="Not offered")
    @router.post(f"{_REPOSITORY}/{{repository}}/models/{{model}}/unload", summary="Not offered")
    async def named(repository: str) -> Response:
        check_repository(repository)
        raise AssertionError("a name in a path is never empty")

    return router


def _parameters(document: Mapping[str, object]) -> Mapping[str, object]:
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidRequest("'parameters' must be an object")
    return parameters
