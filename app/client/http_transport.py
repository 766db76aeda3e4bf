"""Sends over HTTP, by httpx, from a thread or on an event loop."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from convoy.app.client.errors import NOT_A_SERVER
from convoy.app.client.own_headers import OwnHeaders, headers_of
from convoy.app.client.retry import Send
from convoy.app.client.trust import Trust
from convoy.models.errors import DeadlineExceeded, RequestError, Unavailable, UsageError
from convoy.models.tls import ClientTls


def http_options(url: str, api_key: str | None, trust: Trust) -> dict[str, Any]:
    """What both of httpx's clients are made with. Raises UsageError for a URL or key that cannot be one."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"the URL {url!r} should look like http://localhost:8000 or grpc://localhost:8001")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        httpx.URL(url), httpx.Headers(headers)  # both say what is wrong with them
    except httpx.InvalidURL as error:
        raise UsageError(f"the URL {url!r} is none ({error})") from None
    except UnicodeEncodeError:
        raise UsageError(
            "the API key has characters that an HTTP header cannot carry; check where it came from"
        ) from None
    verify = trust.context() if isinstance(trust, ClientTls) else trust
    # trust_env: a proxy meant for the internet must not come between a program and localhost.
    return {"base_url": url, "headers": headers, "verify": verify, "trust_env": False}


class HttpTransport:
    """From any number of threads."""

    def __init__(self, options: dict[str, Any], own: OwnHeaders | None) -> None:
        self._http, self._own = httpx.Client(**options), own

    def send(self, step: Send) -> httpx.Response:
        """The whole reply. Raises Unavailable where nobody answers, DeadlineExceeded, and RequestError."""
        until_s = time.monotonic() + step.within_s
        with _as_own_errors(self._http.base_url, step.within_s):
            reply = self._http.send(_request(self._http, step, self._own), stream=True)
            try:
                body = _in_time(reply, until_s)
                headers = [(name, value) for name, value in reply.headers.items() if name != "content-encoding"]
                return httpx.Response(reply.status_code, headers=headers, content=body)
            finally:
                reply.close()

    def close(self) -> None:
        self._http.close()


class AsyncHttpTransport:
    """On one event loop."""

    def __init__(self, options: dict[str, Any], own: OwnHeaders | None) -> None:
        self._http, self._own = httpx.AsyncClient(**options), own

    async def send(self, step: Send) -> httpx.Response:
        """The whole reply. Raises Unavailable where nobody answers, DeadlineExceeded, and RequestError."""
        with _as_own_errors(self._http.base_url, step.within_s):
            try:
                async with asyncio.timeout(step.within_s):
                    return await self._http.send(_request(self._http, step, self._own))
            except TimeoutError:
                raise httpx.ReadTimeout("the time is over") from None

    async def close(self) -> None:
        await self._http.aclose()


def _request(http: httpx.Client | httpx.AsyncClient, step: Send, own: OwnHeaders | None) -> httpx.Request:
    method, path, body, query, headers = step.message
    whole = headers_of(own) | dict(headers)
    return http.build_request(method, path, content=body, params=query or None, headers=whole, timeout=step.within_s)


def _in_time(reply: httpx.Response, until_s: float) -> bytes:
    """The body, unpacked. httpx gives each wait for bytes the whole time, so that one who drips them has no end."""
    parts = []
    for part in reply.iter_bytes():
        if time.monotonic() > until_s:
            raise httpx.ReadTimeout("the time is over")
        parts.append(part)
    return b"".join(parts)


@contextmanager
def _as_own_errors(url: httpx.URL, within_s: float) -> Iterator[None]:
    try:
        yield
    except httpx.TransportError as error:
        if (reason := _tls_trouble(error)) is not None:
            raise Unavailable(
                f"TLS does not come about with {url} ({reason}); name who signed its certificate (--ca-file, verify=) "
                "and, where it asks for one, a certificate of your own (--client-cert-file, cert=)"
            ) from None
        raise _own_error(error, url, within_s) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RequestError(f"{url} cannot be asked ({error}); {NOT_A_SERVER}") from None


def _own_error(error: httpx.TransportError, url: httpx.URL, within_s: float) -> RequestError:
    if isinstance(error, httpx.ConnectError):
        return Unavailable(
            f"nobody answers at {url}; start it with `convoy serve`, or check the URL", retry_after_s=0.0
        )
    if isinstance(error, httpx.TimeoutException):
        return DeadlineExceeded(f"{url} did not answer within {within_s:.3g} s; look at the server's log")
    # A server that asks for a certificate says so after the connection has come about, if the words get here at all.
    hint = "does it ask for a certificate (--client-cert-file, cert=)? " if url.scheme == "https" else ""
    return Unavailable(f"the connection to {url} broke off ({error}); {hint}{NOT_A_SERVER}", retry_after_s=0.0)


def _tls_trouble(error: BaseException | None) -> str | None:
    """Why there is no TLS, where that is what is wrong."""
    while error is not None:
        if isinstance(error, ssl.SSLError) and error.reason is not None:
            return getattr(error, "verify_message", "") or error.reason.lower().replace("_", " ")
        error = error.__cause__ or error.__context__
    return None
