"""Finds the model and the form of its requests before the run, with a few requests.

The clients of each protocol send these requests. A wrong name or URL fails here, before the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convoy.loadtest.endpoint import Endpoint, find_endpoint, wire_url
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.request_pool import RequestPool
from convoy.loadtest.server_side import Kind, ServerClient, without_protocol
from convoy.models.errors import JobError, UsageError


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """A server, one of its models, and requests that it answers. `server` and `metadata` are its own documents."""

    endpoint: Endpoint
    model: str
    body: Kind
    requests: RequestPool
    server: dict[str, object]
    metadata: dict[str, object]


def open_client(options: LoadTestOptions) -> ServerClient:
    """The client for the protocol that the URL or the options name. Raises UsageError and JobError."""
    endpoint = find_endpoint(wire_url(options.url, options.protocol), options.tls)
    if endpoint.is_grpc:
        from convoy.loadtest.grpc_client import GrpcServerClient

        return GrpcServerClient(endpoint, options)
    from convoy.loadtest.http_client import HttpServerClient

    return HttpServerClient(endpoint, options)


def find_target(client: ServerClient, options: LoadTestOptions) -> LoadTarget:
    """Find what to test. Raises UsageError if --model is needed, JobError if the server cannot be tested like this."""
    server, endpoint = client.server(), client.endpoint
    model = options.model or _only_model(client.models(), endpoint.url, bool(server))
    metadata = client.metadata(model)
    if metadata is None:
        raise _no_such_model(model, client.models(), endpoint.url, bool(server))
    tried = client.try_requests(model, metadata, options)
    return LoadTarget(endpoint, model, tried.kind, tried.pool, server, metadata)


def _only_model(names: Sequence[str] | None, url: str, has_protocol: bool) -> str:
    if names is None and not has_protocol:
        raise without_protocol(url)
    if names is None:
        raise UsageError(f"{url} does not list its models; choose one with --model NAME")
    if not names:
        raise JobError(f"{url} has no ready model; wait, or see the log of the server")
    if len(names) > 1:
        raise UsageError(f"{url} serves {', '.join(names)}; choose one with --model NAME")
    return names[0]


def _no_such_model(model: str, names: Sequence[str] | None, url: str, has_protocol: bool) -> JobError:
    if names is None and not has_protocol:
        return without_protocol(url)
    served = f"it serves {', '.join(names)}" if names else "see the documentation of the server for its models"
    return JobError(f"{url} has no model {model!r}; {served}")
