"""The client behind `convoy predict`: images in, one table out.

Knows the predictions route and its answers, of every task. Knows nothing of the server's inside; it could be copied
into anybody's program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from convoy.models.errors import ConvoyError, JobError, NotFound, RequestError, Unauthorized, UsageError

TIMEOUT_S = 60.0
NOT_A_SERVER = "is it a Convoy server?"


@dataclass(frozen=True, slots=True)
class FoundInImage:
    """What an image's answer says, as cells of a table: label, class, and what the task has beside them."""

    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def predict(
    url: str,
    model: str,
    images: Sequence[Path],
    top_k: int | None,
    api_key: str | None,
    console: Console | None = None,
    errors: Console | None = None,
) -> int:
    """Asks for each image and prints what is in it: the `top_k` best classes or boxes, or how much of it each class
    covers. Gives the exit code. `top_k` None leaves it to the server.

    An image that cannot be read or is refused is one line on stderr, and the others go on: exit code 1. Raises JobError
    where going on makes no sense (no server, no such model, wrong key), UsageError for a wrong call.
    """
    if not images:
        raise UsageError("name at least one image file")
    if top_k is not None and top_k < 1:
        raise UsageError(f"--top-k must be at least 1, not {top_k}")
    console, errors = console or Console(), errors or Console(stderr=True)
    table: Table | None = None
    problems: list[str] = []
    with _open(url, api_key) as http:
        for image in images:
            try:
                found = ask(http, model, image, top_k)
                table = table or Table("image", *found.headings)
                _add_rows(table, image, found)
            except (NotFound, Unauthorized) as error:
                raise JobError(str(error)) from None
            except RequestError as error:
                problems.append(f"{image}: {error}")
    if table is not None and table.row_count:
        console.print(table)
    for problem in problems:
        errors.print(escape(problem), style="red", soft_wrap=True)
    return 1 if problems else 0


def ask(http: httpx.Client, model: str, image: Path, top_k: int | None) -> FoundInImage:
    """What is in one image, the best or the most first.

    Raises RequestError for what is wrong with this image or this answer, NotFound and Unauthorized for what
    would go wrong with every image, JobError where there is no server.
    """
    try:
        body = image.read_bytes()
    except OSError as error:
        raise RequestError(f"cannot be read ({error.strerror}); check the path") from None
    response = _post(http, f"/predictions/{quote(model, safe='')}", body, {} if top_k is None else {"top_k": top_k})
    if response.status_code == 200:
        return _found(response)
    words = _error_words(response)
    if response.status_code == 404:
        raise NotFound(f"{words}; {_what_is_served(http)}")
    if response.status_code == 401:
        raise Unauthorized(f"{words}; give a file with the key: --api-key-file or CONVOY_API_KEY_FILE")
    raise RequestError(words)


def _open(url: str, api_key: str | None) -> httpx.Client:
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--url {url!r} should look like http://localhost:8000")
    try:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # trust_env: a proxy meant for the internet must not come between a person and localhost.
        return httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False)
    except httpx.InvalidURL as error:
        raise UsageError(f"--url {url!r} is not a URL ({error})") from None
    except UnicodeEncodeError:
        raise UsageError(
            "the API key has characters that an HTTP header cannot carry; check where it came from"
        ) from None


def _post(http: httpx.Client, path: str, body: bytes, query: dict[str, int] | None = None) -> httpx.Response:
    try:
        return http.post(path, content=body, params=query, headers={"Content-Type": "application/octet-stream"})
    except httpx.ConnectError:
        raise JobError(f"nobody answers at {http.base_url}; start it with `convoy serve`, or check --url") from None
    except httpx.TimeoutException:
        raise JobError(f"{http.base_url} did not answer within {TIMEOUT_S:g} s; look at the server's log") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise JobError(f"the connection to {http.base_url} broke off ({error}); {NOT_A_SERVER}") from None


def _found(response: httpx.Response) -> FoundInImage:
    try:
        document = response.json()
        if "detections" in document:
            boxes = [(*_class(row), f"{row['score']:.4f}", _numbers(row["box"])) for row in document["detections"]]
            return FoundInImage(("label", "class", "score", "box: x1, y1, x2, y2"), boxes)
        if "segmentation" in document:
            classes = sorted(document["segmentation"]["classes"], key=lambda row: -float(row["share"]))
            return FoundInImage(
                ("label", "class", "share"), [(*_class(row), f"{100 * row['share']:.1f} %") for row in classes]
            )
        rows = [(*_class(row), f"{row['score']:.4f}") for row in document["predictions"]]
        return FoundInImage(("label", "class", "score"), rows)
    except (ValueError, KeyError, TypeError):
        raise RequestError(f"the answer is not a prediction; {NOT_A_SERVER}") from None


def _class(row: dict[str, Any]) -> tuple[str, str]:
    return "" if row["label"] is None else escape(row["label"]), str(int(row["class_id"]))


def _numbers(values: list[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _error_words(response: httpx.Response) -> str:
    """The server's own words, which say what to do; else its status."""
    try:
        return str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code} without an explanation; {NOT_A_SERVER}"


def _what_is_served(http: httpx.Client) -> str:
    try:
        rows = _post(http, "/v2/repository/index", b"{}").json()
        names = sorted({str(row["name"]) for row in rows if row.get("state", "READY") == "READY"})
    except (ConvoyError, ValueError, KeyError, TypeError, AttributeError):
        return NOT_A_SERVER
    return f"the server has {', '.join(names)}" if names else "the server has no model ready"


def _add_rows(table: Table, image: Path, found: FoundInImage) -> None:
    for rank, cells in enumerate(found.rows or [("nothing found",)]):
        shown = escape(str(image)) if rank == 0 else ""
        table.add_row(shown, *cells, end_section=rank >= len(found.rows) - 1)
