"""The client behind `convoy predict`: images in, one table out.

Knows the predictions route and its answers. Knows nothing of the server's inside; it could be copied into
anybody's program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from convoy.models.errors import ConvoyError, JobError, NotFound, RequestError, Unauthorized, UsageError

TIMEOUT_S = 60.0
NOT_A_SERVER = "is it a Convoy server?"


@dataclass(frozen=True, slots=True)
class PredictedClass:
    """`score` as the model's activation gives it; `label` None where the model has none."""

    class_id: int
    label: str | None
    score: float


def predict(
    url: str,
    model: str,
    images: Sequence[Path],
    top_k: int,
    api_key: str | None,
    console: Console | None = None,
    errors: Console | None = None,
) -> int:
    """Asks for each image and prints label and score of its `top_k` best classes. Gives the exit code.

    An image that cannot be read or is refused is one line on stderr, and the others go on: exit code 1. Raises JobError
    where going on makes no sense (no server, no such model, wrong key), UsageError for a wrong call.
    """
    if not images:
        raise UsageError("name at least one image file")
    if top_k < 1:
        raise UsageError(f"--top-k must be at least 1, not {top_k}")
    console, errors = console or Console(), errors or Console(stderr=True)
    table = Table("image", "label", "class", "score")
    problems: list[str] = []
    with _open(url, api_key) as http:
        for image in images:
            try:
                _add_rows(table, image, ask(http, model, image, top_k))
            except (NotFound, Unauthorized) as error:
                raise JobError(str(error)) from None
            except RequestError as error:
                problems.append(f"{image}: {error}")
    if table.row_count:
        console.print(table)
    for problem in problems:
        errors.print(escape(problem), style="red", soft_wrap=True)
    return 1 if problems else 0


def ask(http: httpx.Client, model: str, image: Path, top_k: int) -> list[PredictedClass]:
    """One image's predictions, best first.

    Raises RequestError for what is wrong with this image or this answer, NotFound and Unauthorized for what
    would go wrong with every image, JobError where there is no server.
    """
    try:
        body = image.read_bytes()
    except OSError as error:
        raise RequestError(f"cannot be read ({error.strerror}); check the path") from None
    response = _post(http, f"/predictions/{quote(model, safe='')}", body, {"top_k": top_k})
    if response.status_code == 200:
        return _predictions(response)
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


def _predictions(response: httpx.Response) -> list[PredictedClass]:
    try:
        rows = response.json()["predictions"]
        return [PredictedClass(int(row["class_id"]), row["label"], float(row["score"])) for row in rows]
    except (ValueError, KeyError, TypeError):
        raise RequestError(f"the answer is not a prediction; {NOT_A_SERVER}") from None


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


def _add_rows(table: Table, image: Path, predictions: Sequence[PredictedClass]) -> None:
    for rank, found in enumerate(predictions):
        name = "" if found.label is None else escape(found.label)
        last = rank == len(predictions) - 1
        shown = escape(str(image)) if rank == 0 else ""
        table.add_row(shown, name, str(found.class_id), f"{found.score:.4f}", end_section=last)
