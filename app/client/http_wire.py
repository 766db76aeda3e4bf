"""HTTP: paths, bodies and documents, sent by httpx from threads or on an event loop.

docs/protocol.md lists the routes.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias
from urllib.parse import quote

import httpx
import numpy as np

from convoy.app.client.options import OwnHeaders, Trust, headers_of
from convoy.app.client.records import (
    NOT_A_SERVER,
    NamedTensor,
    RemoteModel,
    Sight,
    models_of,
    of_status,
    sight_of,
    tensors_of,
)
from convoy.app.client.retry import WireQuestion
from convoy.models.errors import DeadlineExceeded, RequestError, Unavailable, UsageError
from convoy.models.tls import ClientTls

HEADER_LENGTH = "Inference-Header-Content-Length"
_BYTES = (("Content-Type", "application/octet-stream"),)
_Pairs: TypeAlias = tuple[tuple[str, str], ...]


class HttpWire:
    """A server over HTTP. Raises UsageError for an invalid URL or key; does not connect yet."""

    def __init__(self, url: str, api_key: str, trust: Trust, own: OwnHeaders | None, *, is_async: bool) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            httpx.URL(url)
        except httpx.InvalidURL as error:
            raise UsageError(f"the URL {url!r} is not valid ({error})") from None
        verify = trust.context() if isinstance(trust, ClientTls) else trust
        kind = httpx.AsyncClient if is_async else httpx.Client
        # trust_env: a proxy meant for the internet must not be used for localhost.
        self._http: Any = kind(base_url=url, headers=headers, verify=verify, trust_env=False)
        self._own = own

    def look(
        self,
        model: str,
        version: str | None,
        image: bytes,
        options: Mapping[str, int | float | str],
    ) -> WireQuestion[Sight]:
        """Predict by the model's task, with `options` of the route."""
        path = "/".join(("/predictions", *(quote(part, safe="") for part in (model, version) if part is not None)))
        asked = [(name, f"{value}") for name, value in options.items()]
        return WireQuestion(
            lambda left_s: self._request(left_s, path, image, (*asked, _within(left_s)), _BYTES),
            lambda response: sight_of(_document(response)),
        )

    def infer(
        self,
        model: str,
        version: str | None,
        inputs: Mapping[str, np.ndarray],
        outputs: Sequence[str] | None,
        priority: int,
    ) -> WireQuestion[dict[str, np.ndarray]]:
        """Raises InvalidRequest."""
        tensors = tensors_of(inputs)
        described = [
            {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(data)}}
            for name, datatype, shape, data in tensors
        ]
        path = _model_path(model, version) + "/infer"
        parameters = {"binary_data_output": True, **({"priority": priority} if priority else {})}
        document: dict[str, Any] = {"inputs": described, "parameters": parameters}
        if outputs is not None:
            document["outputs"] = [{"name": name} for name in outputs]
        header = json.dumps(document).encode()
        body = b"".join((header, *(tensor.data for tensor in tensors)))
        headers = (*_BYTES, (HEADER_LENGTH, f"{len(header)}"), ("Accept-Encoding", "identity"))
        return WireQuestion(lambda left_s: self._request(left_s, path, body, (_within(left_s),), headers), _tensors)

    def models(self) -> WireQuestion[tuple[RemoteModel, ...]]:
        """The served models, and those that were refused, with the reason."""
        return WireQuestion(
            lambda left_s: self._request(left_s, "/v2/repository/index", b"{}"),
            lambda response: models_of(_document(response)),
        )

    def send(self, request: httpx.Request, within_s: float) -> httpx.Response:
        """Send a request and return the whole reply. Raises Unavailable if no server answers, DeadlineExceeded, and
        RequestError.
        """
        until_s = time.monotonic() + within_s
        with _as_own_errors(self._http.base_url, within_s):
            reply = self._http.send(request, stream=True)
            try:
                body = _in_time(reply, until_s)
                headers = [(name, value) for name, value in reply.headers.items() if name != "content-encoding"]
                return httpx.Response(reply.status_code, headers=headers, content=body)
            finally:
                reply.close()

    async def send_async(self, request: httpx.Request, within_s: float) -> httpx.Response:
        """Like `send`."""
        with _as_own_errors(self._http.base_url, within_s):
            try:
                async with asyncio.timeout(within_s):
                    response: httpx.Response = await self._http.send(request)
                    return response
            except TimeoutError:
                raise httpx.ReadTimeout("the timeout expired") from None

    def close(self) -> None:
        self._http.close()

    async def close_async(self) -> None:
        await self._http.aclose()

    def _request(
        self, within_s: float, path: str, body: bytes, query: _Pairs = (), headers: _Pairs = ()
    ) -> httpx.Request:
        own = headers_of(self._own) | dict(headers)
        with _as_own_errors(self._http.base_url, within_s):
            request: httpx.Request = self._http.build_request(
                "POST", path, content=body, params=query or None, headers=own, timeout=within_s
            )
        return request


def _within(left_s: float) -> tuple[str, str]:
    """Tell the server the remaining time, so that it drops requests whose client does not wait any more."""
    return "timeout_ms", f"{max(1.0, left_s * 1000):.0f}"


def _model_path(model: str, version: str | None) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return path if version is None else f"{path}/versions/{quote(version, safe='')}"


def _tensors(response: httpx.Response) -> dict[str, np.ndarray]:
    _refuse_errors(response)
    content, length = response.content, response.headers.get(HEADER_LENGTH)
    try:
        at = len(content) if length is None else int(length)
        document = json.loads(content[:at])
        found = {}
        for output in document["outputs"]:
            shape = [int(size) for size in output["shape"]]
            end = at + int(output["parameters"]["binary_data_size"])
            tensor = NamedTensor(str(output["name"]), str(output["datatype"]), shape, content[at:end])
            found[tensor.name], at = tensor.array(), end
    except (ValueError, KeyError, TypeError):
        raise RequestError(f"the response does not follow the protocol; {NOT_A_SERVER}") from None
    return found


def _document(response: httpx.Response) -> Any:
    _refuse_errors(response)
    try:
        return response.json()
    except ValueError:
        raise RequestError(f"the response is not JSON; {NOT_A_SERVER}") from None


def _refuse_errors(response: httpx.Response) -> None:
    """Raise the server's error with its message, or else its status."""
    if response.status_code == 200:
        return
    try:
        document = response.json()
        words, code = str(document["error"]), str(document.get("code", ""))
    except (ValueError, KeyError, TypeError):
        words, code = f"HTTP {response.status_code} without an explanation; {NOT_A_SERVER}", ""
    raise of_status(response.status_code, words, response.headers.get("Retry-After"), code)


def _in_time(reply: httpx.Response, until_s: float) -> bytes:
    """The body, decompressed. httpx's timeout applies to each read, so a slow server could take for ever."""
    parts = []
    for part in reply.iter_bytes():
        if time.monotonic() > until_s:
            raise httpx.ReadTimeout("the timeout expired")
        parts.append(part)
    return b"".join(parts)


@contextmanager
def _as_own_errors(url: httpx.URL, within_s: float) -> Iterator[None]:
    try:
        yield
    except httpx.TransportError as error:
        if (reason := _tls_trouble(error)) is not None:
            raise Unavailable(
                f"TLS with {url} failed ({reason}); pass the CA of its certificate (--ca-file, verify=) "
                "and, if the server requires one, a client certificate (--client-cert-file, cert=)"
            ) from None
        raise _own_error(error, url, within_s) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RequestError(f"cannot send the request to {url} ({error}); {NOT_A_SERVER}") from None


def _own_error(error: httpx.TransportError, url: httpx.URL, within_s: float) -> RequestError:
    if isinstance(error, httpx.ConnectError):
        return Unavailable(
            f"cannot connect to {url}; start it with `convoy serve`, or check the URL", retry_after_s=0.0
        )
    if isinstance(error, httpx.TimeoutException):
        return DeadlineExceeded(f"{url} did not answer within {within_s:.3g} s; check the server's log")
    # A server that requires a certificate says so only after the connection is established, if its message arrives at
    # all.
    hint = "does it require a client certificate (--client-cert-file, cert=)? " if url.scheme == "https" else ""
    return Unavailable(f"the connection to {url} was closed ({error}); {hint}{NOT_A_SERVER}", retry_after_s=0.0)


def _tls_trouble(error: BaseException | None) -> str | None:
    """Explain a TLS error, if it is one."""
    while error is not None:
        if isinstance(error, ssl.SSLError) and error.reason is not None:
            return getattr(error, "verify_message", "") or error.reason.lower().replace("_", " ")
        error = error.__cause__ or error.__context__
    return None
