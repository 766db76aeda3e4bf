"""What the server serves and how to ask it: found out before the run, with a handful of requests.

Knows the protocol's metadata routes. Uses an ordinary HTTP client, because nothing here is measured. Every
surprise ends as one line, before a run of minutes is wasted on a wrong name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import httpx

from loadtest import bodies
from loadtest.answers import AnswerCheck, Route, error_text
from loadtest.endpoint import Endpoint, find_endpoint
from loadtest.options import LoadOptions
from loadtest.sender import Ammunition
from models.errors import JobError, UsageError

Kind = Literal["image", "binary", "json"]

# Overload is a thing to measure, not a reason to stop before measuring.
SHED = (429, 503)


@dataclass(frozen=True, slots=True)
class Target:
    """A server, one of its models, and requests that it answers. `server` and `metadata` are its own words."""

    endpoint: Endpoint
    model: str
    body: Kind
    ammunition: Ammunition
    server: dict[str, object]
    metadata: dict[str, object]


def find_target(options: LoadOptions) -> Target:
    """Raises UsageError where --model is needed, JobError where the server cannot be tested as asked."""
    endpoint = find_endpoint(options.url)
    with Scout(endpoint, options) as scout:
        model = options.model or scout.only_model()
        metadata = scout.metadata(model)
        kind, ammunition = scout.ammunition(model, metadata, options)
        return Target(endpoint, model, kind, ammunition, scout.server(), metadata)


class Scout:
    """Asks the questions. A context manager, because it holds a connection."""

    def __init__(self, endpoint: Endpoint, options: LoadOptions) -> None:
        self._endpoint = endpoint
        self._api_key = options.api_key
        # trust_env: the run itself goes straight to the server, past any proxy; so must the questions.
        self._http = httpx.Client(
            base_url=endpoint.url,
            timeout=options.timeout_s,
            headers=dict(bodies.auth_headers(options.api_key)),
            trust_env=False,
        )

    def __enter__(self) -> Scout:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def server(self) -> dict[str, object]:
        """The server's name and version; empty where it does not tell."""
        return _object(self._ask("GET", "/v2"))

    def models(self) -> list[str] | None:
        """The names of the ready models; None where the server does not list them."""
        response = self._ask("POST", "/v2/repository/index", b'{"ready":true}')
        try:
            rows = response.json() if response.status_code == 200 else None
        except ValueError:
            return None
        if not isinstance(rows, list):
            return None
        names = (row.get("name") for row in rows if isinstance(row, dict) and row.get("state", "READY") == "READY")
        return sorted({name for name in names if isinstance(name, str)})

    def only_model(self) -> str:
        names = self.models()
        if names is None:
            raise UsageError(f"{self._endpoint.url} does not list its models; say which one with --model NAME")
        if not names:
            raise JobError(f"{self._endpoint.url} has no model ready; wait for it, or look at its log")
        if len(names) > 1:
            raise UsageError(f"{self._endpoint.url} serves {', '.join(names)}; choose one with --model NAME")
        return names[0]

    def metadata(self, model: str) -> dict[str, object]:
        response = self._ask("GET", bodies.model_path(model))
        if response.status_code == 200:
            found = _object(response)
            if found:
                return found
            raise JobError(f"{response.url} answered with something other than metadata; is it an inference server?")
        if response.status_code == 404:
            names = self.models()
            served = f"it serves {', '.join(names)}" if names else "see its /v2/repository/index"
            raise JobError(f"{self._endpoint.url} has no model {model!r}; {served}")
        raise _unexpected(response)

    def ammunition(self, model: str, metadata: dict[str, object], options: LoadOptions) -> tuple[Kind, Ammunition]:
        """The requests to send, each kind tried once before it is trusted."""
        images = bodies.image_payloads()
        if options.body == "image" and not images:
            raise JobError(f"no images in {bodies.DATA}; install Convoy again, or use --body binary")
        if options.body == "image" or (options.body == "auto" and images):
            tried = self._try(bodies.predictions_path(model), images, "predictions")
            if tried is not None:
                return "image", tried
            if options.body == "image":
                raise JobError(f"model {model!r} does not take images; use --body binary")
        kind: Kind = "json" if options.body == "json" else "binary"
        inputs = _inputs(metadata)
        make = bodies.json_payloads if kind == "json" else bodies.binary_payloads
        tried = self._try(bodies.infer_path(model), make(inputs, options.seed), "infer")
        if tried is None:
            raise JobError(
                f"model {model!r} has no {bodies.infer_path(model)}; is {self._endpoint.url} the right server?"
            )
        return kind, tried

    def _try(self, path: str, payloads: list[bodies.Payload], route: Route) -> Ammunition | None:
        """None: this route is not there or not for this model."""
        first = payloads[0]
        response = self._ask("POST", path, first.body, dict(first.headers))
        if route == "predictions" and response.status_code in (400, 404, 405, 415, 501):
            return None
        if route == "infer" and response.status_code == 404:
            return None
        check = AnswerCheck(route)
        if response.status_code not in SHED:
            if response.status_code != 200:
                raise _unexpected(response)
            problem = check(0, 200, response.content)
            if problem is not None:
                raise JobError(f"{response.url} answered {problem.text}; it cannot be tested like this")
        requests = [bodies.request_bytes(self._endpoint, path, payload, self._api_key) for payload in payloads]
        return Ammunition(requests, check)

    def _ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        try:
            return self._http.request(method, path, content=body, headers=headers)
        except httpx.TimeoutException:
            raise JobError(
                f"{self._endpoint.url}{path} did not answer within {self._http.timeout.read:g} s; "
                "look at the server's log, or raise --timeout"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise JobError(
                f"{self._endpoint.url}{path} broke off ({error}); check that --url is an inference server"
            ) from None


def _inputs(metadata: dict[str, object]) -> list[bodies.Input]:
    rows = metadata.get("inputs")
    try:
        if not isinstance(rows, list) or not rows:
            raise ValueError("no inputs")
        return [bodies.Input(str(row["name"]), str(row["datatype"]), tuple(map(int, row["shape"]))) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise JobError(f"the server's metadata cannot be used ({error}); use --body image for an image model") from None


def _object(response: httpx.Response) -> dict[str, object]:
    try:
        found = response.json() if response.status_code == 200 else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _unexpected(response: httpx.Response) -> JobError:
    hint = "give --api-key" if response.status_code == 401 else "the server's log may say more"
    return JobError(f"{response.url} answered HTTP {response.status_code}: {error_text(response.content)}; {hint}")
