"""The body of a control route: a small JSON object, or nothing.

The clients that send it name no content type, so FastAPI must not parse it; and it is read into ordinary
memory, so it must be bounded.
"""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import Request

from convoy.models.errors import BodyTooLarge, InvalidRequest

MAX_BYTES = 1 << 20


async def read_object(request: Request, example: str) -> dict[str, Any]:
    """The object, empty where there is no body. Raises InvalidRequest or BodyTooLarge.

    `example` is what a right body looks like.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BYTES:
            raise BodyTooLarge(f"the body of this route exceeds the maximum of {MAX_BYTES} bytes; send less")
    try:
        document = orjson.loads(bytes(body) or b"{}")
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}; send {example}") from error
    if not isinstance(document, dict):
        raise InvalidRequest(f"the body must be a JSON object such as {example}")
    return document
