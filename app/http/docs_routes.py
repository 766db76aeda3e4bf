"""`/docs`: the routes for people, in Swagger UI, with nothing that comes from anywhere else.

Its script and style are those that the package fastapi-offline carries, of which nothing is imported. The page and what
belongs to it say what Convoy is and nothing of what it serves, so they are there without a key: a browser that opens a
page has none to send.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from fastapi import APIRouter, Response

from convoy.app.http.examples import BLACK_PICTURE, BLACK_PICTURE_FILE
from convoy.models.errors import NotFound

_OWN = Path(__file__).with_name("docs_page")
_KINDS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "start.js": "text/javascript",
    "seven.png": "image/png",
    "seven.jpg": "image/jpeg",
    "black.answer": "application/octet-stream",
}
# Swagger UI writes styles and small pictures into the page. What runs comes from here alone, and only here is asked.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_GUARDED = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


def docs_routes() -> APIRouter:
    """The page, its parts, and the files that the document's examples name."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def page() -> Response:
        return Response((_OWN / "page.html").read_bytes(), media_type="text/html", headers=_GUARDED)

    @router.get("/docs/{name}")
    async def part(name: str) -> Response:
        if name == BLACK_PICTURE_FILE:
            return Response(BLACK_PICTURE, media_type="application/octet-stream", headers=_GUARDED)
        if name not in _KINDS:
            raise NotFound(f"the page /docs has no {name!r}")
        return Response(_content(name), media_type=_KINDS[name], headers=_GUARDED)

    return router


def seven() -> bytes:
    """The picture that examples send, as a PNG."""
    return _content("seven.png")


@cache
def _content(name: str) -> bytes:
    own = _OWN / name
    return own.read_bytes() if own.exists() else (_swagger_ui() / name).read_bytes()


def _swagger_ui() -> Path:
    """Where the package has its files."""
    spec = find_spec("fastapi_offline")
    if spec is None or spec.origin is None:
        raise NotFound("the page /docs needs the package fastapi-offline; install it, or read /openapi.json")
    return Path(spec.origin).with_name("static")
