"""The body of a control route: a small JSON object, or nothing.

The clients that send it name no content type, so FastAPI must not parse it, and it is read into ordinary memory: its
length is bounded, and its time is as any body's.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from fastapi import Request

from convoy.app.edge.http.body import too_slow
from convoy.app.edge.options import BodyLimits
from convoy.models.errors import BodyTooLarge, InvalidRequest

MAX_BYTES = 1 << 20


async def read_object(request: Request, example: str, limits: BodyLimits) -> dict[str, Any]:
    """The object, empty where there is no body. Raises InvalidRequest, BodyTooLarge or RequestTimeout.

    `example` is what a right body looks like; of the limits those of time hold.
    """
    body, begun_s = bytearray(), asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(begun_s + limits.seconds_for(0)) as limit:
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BYTES:
                    raise BodyTooLarge(f"the body of this route exceeds the maximum of {MAX_BYTES} bytes; send less")
                limit.reschedule(begun_s + limits.seconds_for(len(body)))
    except TimeoutError as error:
        raise too_slow(limits.seconds_for(len(body))) from error
    try:
        document = orjson.loads(bytes(body) or b"{}")
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}; send {example}") from error
    if not isinstance(document, dict):
        raise InvalidRequest(f"the body must be a JSON object such as {example}")
    return document
