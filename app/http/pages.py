"""The pages for people: `/`, the reports of bundles, and `/docs`, which is Swagger UI. None loads another site's files.

The page at `/` is one document, joined from the parts in `page_parts`. Its Content-Security-Policy allows requests to
this server only, and names its one script and one style by their hashes. `/docs` uses the script and style files of the
package fastapi-offline and imports none of its code. `/` and `/docs` contain no secrets and need no key, because a
browser sends none when it opens a page. A report needs a key like any other figures.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from fastapi import APIRouter, Response

from convoy.app.http.examples import BLACK_PICTURE, BLACK_PICTURE_FILE
from convoy.models.errors import NotFound

_PARTS = Path(__file__).with_name("page_parts")
# In this order. Only `begin` runs anything at once.
_SCRIPTS = (
    "format",
    "elements",
    "server",
    "charts",
    "time_split",
    "store",
    "opened",
    "overview",
    "overlay",
    "picture",
    "begin",
)


@cache
def page_response() -> Response:
    """The page at `/`, read at the first request."""
    uplot = _PARTS / "uplot"
    licence = (uplot / "LICENSE").read_text()
    style = _joined(f"/* uPlot: {licence}*/", (uplot / "uPlot.min.css").read_text(), (_PARTS / "page.css").read_text())
    own = [(_PARTS / f"{name}.js").read_text() for name in _SCRIPTS]
    library = (uplot / "uPlot.iife.min.js").read_text()
    script = _joined(f"/* uPlot: {licence}*/", library, "(() => {", '"use strict";', *own, "})();")
    text = (_PARTS / "page.html").read_text()
    for mark, part in (("/* style */", style), ("/* script */", script)):
        text = text.replace(mark, part)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; "
        "img-src blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )
    headers = {**_GUARDED, "Content-Security-Policy": policy, "Cache-Control": "no-cache"}
    return Response(text, media_type="text/html", headers=headers)


def report_response(report: bytes) -> Response:
    """The report of a bundle. A bundle comes from elsewhere, so nothing in its report may run."""
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; sandbox"
    )
    headers = {**_GUARDED, "Content-Security-Policy": policy, "Cache-Control": "no-cache"}
    return Response(report, media_type="text/html", headers=headers)


def _joined(*parts: str) -> str:
    return "\n" + "\n".join(part.rstrip("\n") for part in parts) + "\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_OWN = Path(__file__).with_name("docs_page")
_KINDS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "start.js": "text/javascript",
    "seven.png": "image/png",
    "seven.jpg": "image/jpeg",
    "black.answer": "application/octet-stream",
}
# Swagger UI writes styles and small images into the page. Scripts and requests are limited to this server.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_GUARDED = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


def docs_routes() -> APIRouter:
    """The page `/docs`, its parts, and the files that the examples in the document name."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def page() -> Response:
        return Response((_OWN / "page.html").read_bytes(), media_type="text/html", headers=_GUARDED)

    @router.get("/docs/{name}")
    async def part(name: str) -> Response:
        if name == BLACK_PICTURE_FILE:
            return Response(BLACK_PICTURE, media_type="application/octet-stream", headers=_GUARDED)
        if name not in _KINDS:
            raise NotFound(f"the page /docs has no file {name[:100]!r}; open /docs")
        return Response(_content(name), media_type=_KINDS[name], headers=_GUARDED)

    return router


def seven() -> bytes:
    """The image that the examples send, as a PNG."""
    return _content("seven.png")


@cache
def _content(name: str) -> bytes:
    own = _OWN / name
    return own.read_bytes() if own.exists() else (_swagger_ui() / name).read_bytes()


def _swagger_ui() -> Path:
    """The folder of the package's files."""
    spec = find_spec("fastapi_offline")
    if spec is None or spec.origin is None:
        raise NotFound("the page /docs needs the package fastapi-offline; install it, or read /openapi.json")
    return Path(spec.origin).with_name("static")
