"""How errors are described in the OpenAPI document of the routes that FastAPI documents."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class ErrorBody(BaseModel):
    """Every error on every route."""

    error: str


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in (
        (400, "The request is wrong"),
        (401, "The API key is missing or wrong"),
        (403, "A web page of somebody else's asks"),
        (404, "There is no such model, version, region or page"),
        (413, "The body is too large"),
        (501, "An extension that is not offered"),
        (503, "Not ready"),
    )
}
