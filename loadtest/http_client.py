"""The HTTP client for everything but the load: metadata, one test request, statistics and metrics.

It uses an ordinary HTTP library, because nothing here is measured.
"""

from __future__ import annotations

import httpx

from convoy.loadtest import bodies
from convoy.loadtest.answers import AnswerCheck, Form, error_text
from convoy.loadtest.endpoint import Endpoint
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.request_pool import RequestPool
from convoy.loadtest.server_side import (
    Kind,
    ProcessReading,
    Snapshot,
    TriedRequests,
    inputs_of,
    read_processes,
    snapshot,
)
from convoy.models.errors import JobError

# An overloaded server can be measured.
SHED = (429, 503)
# The status for an image on servers without a route for images, and for models that take none.
NO_IMAGES = (400, 404, 405, 415, 501)
NOT_THERE = (404, 405, 501)
AT_ONCE_S = 2.0  # a reading that takes longer is not used


class HttpServerClient:
    """`ServerClient` over HTTP."""

    def __init__(self, endpoint: Endpoint, options: LoadTestOptions) -> None:
        self.endpoint = endpoint
        self._api_key = options.api_key
        self._deadline = "" if options.deadline_ms is None else f"?timeout_ms={options.deadline_ms:g}"
        # Without a proxy, like the run itself.
        self._http = httpx.Client(
            base_url=endpoint.url,
            timeout=options.timeout_s,
            headers=dict(bodies.auth_headers(options.api_key)),
            verify=endpoint.tls_context() or False,
            trust_env=False,
        )

    def close(self) -> None:
        self._http.close()

    def server(self) -> dict[str, object]:
        return _object(self._ask("GET", "/v2"))

    def models(self) -> list[str] | None:
        response = self._ask("POST", "/v2/repository/index", b'{"ready":true}')
        try:
            rows = response.json() if response.status_code == 200 else None
        except ValueError:
            return None
        if not isinstance(rows, list):
            return None
        names = (row.get("name") for row in rows if isinstance(row, dict) and row.get("state", "READY") == "READY")
        return sorted({name for name in names if isinstance(name, str)})

    def metadata(self, model: str) -> dict[str, object] | None:
        response = self._ask("GET", bodies.model_path(model))
        if response.status_code == 200:
            found = _object(response)
            if found:
                return found
            raise JobError(f"{response.url} did not answer with metadata; is it an inference server?")
        if response.status_code in NOT_THERE:
            return None
        raise _unexpected(response)

    def try_requests(self, model: str, metadata: dict[str, object], options: LoadTestOptions) -> TriedRequests:
        folder = options.images or bodies.DATA
        images = bodies.image_payloads(folder)
        needs_images = options.body == "image" or options.images is not None
        if needs_images and not images:
            advice = "install Convoy again, or use --body binary" if options.images is None else "name another folder"
            raise JobError(f"no images ({', '.join(bodies.IMAGE_SUFFIXES)}) in {folder}; {advice}")
        if needs_images or (options.body == "auto" and images):
            tried = self._try(bodies.predictions_path(model), images, "predictions")
            if tried is not None:
                return TriedRequests("image", tried)
            if needs_images:
                raise JobError(f"model {model!r} does not take images; use --body binary")
        kind: Kind = "json" if options.body == "json" else "binary"
        make = bodies.json_payloads if kind == "json" else bodies.binary_payloads
        tried = self._try(bodies.infer_path(model), make(inputs_of(metadata), options.seed), "infer")
        if tried is None:
            raise JobError(
                f"model {model!r} has no {bodies.infer_path(model)}; is {self.endpoint.url} the right server?"
            )
        return TriedRequests(kind, tried)

    def snapshot(self, model: str) -> Snapshot | None:
        try:
            statistics = _object(self._http.get(f"{bodies.model_path(model)}/stats"))
            metrics = self._http.get("/metrics")
            text = metrics.text if metrics.status_code == 200 else ""
            return snapshot(statistics, text, model) if statistics or text else None
        except (httpx.HTTPError, ValueError):
            return None

    def processes(self) -> tuple[ProcessReading, ...]:
        try:
            metrics = self._http.get("/metrics", timeout=AT_ONCE_S)
            return read_processes(metrics.text) if metrics.status_code == 200 else ()
        except (httpx.HTTPError, ValueError):
            return ()

    def _try(self, path: str, payloads: list[bodies.Payload], form: Form) -> RequestPool | None:
        """None if the route does not exist or is not for this model."""
        first = payloads[0]
        response = self._ask("POST", path, first.body, dict(first.headers))
        if form == "predictions" and response.status_code in NO_IMAGES:
            return None
        if form == "infer" and response.status_code == 404:
            return None
        check = AnswerCheck(form)
        if response.status_code not in SHED:
            if response.status_code != 200:
                raise _unexpected(response)
            problem = check(0, 200, response.content)
            if problem is not None:
                raise JobError(f"{response.url} answered {problem.text}; it cannot be tested like this")
        measured = f"{path}{self._deadline}"
        requests = [bodies.request_bytes(self.endpoint, measured, payload, self._api_key) for payload in payloads]
        return RequestPool(requests, check)

    def _ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        try:
            return self._http.request(method, path, content=body, headers=headers)
        except httpx.TimeoutException:
            raise JobError(
                f"{self.endpoint.url}{path} did not answer within {self._http.timeout.read:g} s; "
                "see the log of the server, or raise --timeout"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise JobError(
                f"{self.endpoint.url}{path} failed ({error}); check that --url is an inference server"
            ) from None


def _object(response: httpx.Response) -> dict[str, object]:
    try:
        found = response.json() if response.status_code == 200 else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _unexpected(response: httpx.Response) -> JobError:
    hint = "give --api-key-file" if response.status_code == 401 else "see the log of the server"
    return JobError(f"{response.url} answered HTTP {response.status_code}: {error_text(response.content)}; {hint}")
