"""The page at `/`: one document with all that it needs, put together from the parts beside it.

It fetches nothing but figures, and those only from the server that it came from: its Content-Security-Policy names the
one script and the one style by their hashes. It holds no secret, so it needs no key.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

from convoy.app.http.replies import Reply

_PARTS = Path(__file__).with_name("page_parts")
# In this order: none of them uses what comes later before the last has begun.
_SCRIPTS = ("format", "elements", "server", "charts", "time_split", "store", "opened", "overview", "picture", "begin")


@cache
def page_reply() -> Reply:
    """Read once, when it is first asked for."""
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
    headers = (
        (b"content-security-policy", policy.encode()),
        (b"cache-control", b"no-cache"),
        (b"referrer-policy", b"no-referrer"),
        (b"x-content-type-options", b"nosniff"),
    )
    return Reply(200, (text.encode(),), "text/html; charset=utf-8", headers)


def _joined(*parts: str) -> str:
    return "\n" + "\n".join(part.rstrip("\n") for part in parts) + "\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
