"""What the server serves and how to ask it: found out before the run, with a handful of requests.

Knows what must be found out and in which order; how each protocol is asked is its client's. Every surprise ends
as one line, before a run of minutes is wasted on a wrong name.
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
    """A server, one of its models, and requests that it answers. `server` and `metadata` are its own words."""

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
    """Raises UsageError where --model is needed, JobError where the server cannot be tested as asked."""
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
        raise UsageError(f"{url} does not list its models; say which one with --model NAME")
    if not names:
        raise JobError(f"{url} has no model ready; wait for it, or look at its log")
    if len(names) > 1:
        raise UsageError(f"{url} serves {', '.join(names)}; choose one with --model NAME")
    return names[0]


def _no_such_model(model: str, names: Sequence[str] | None, url: str, has_protocol: bool) -> JobError:
    if names is None and not has_protocol:
        return without_protocol(url)
    served = f"it serves {', '.join(names)}" if names else "see its own documentation for what it serves"
    return JobError(f"{url} has no model {model!r}; {served}")
