"""What the server serves and how to ask it: found out before the run, with a handful of requests.

Knows what must be found out and in which order; how each protocol is asked is its scout's. Every surprise ends
as one line, before a run of minutes is wasted on a wrong name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from convoy.loadtest import bodies
from convoy.loadtest.ammunition import Ammunition
from convoy.loadtest.endpoint import Endpoint, find_endpoint, wire_url
from convoy.loadtest.options import LoadOptions
from convoy.loadtest.server_side import Snapshot
from convoy.models.errors import JobError, UsageError

Kind = Literal["image", "binary", "json"]


@dataclass(frozen=True, slots=True)
class Shot:
    """Requests that were tried and answered, and what kind of body they have."""

    kind: Kind
    ammunition: Ammunition


@dataclass(frozen=True, slots=True)
class Target:
    """A server, one of its models, and requests that it answers. `server` and `metadata` are its own words."""

    endpoint: Endpoint
    model: str
    body: Kind
    ammunition: Ammunition
    server: dict[str, object]
    metadata: dict[str, object]


class Scout(Protocol):
    """Asks one server over one protocol. `close` must be called, because it holds a connection."""

    endpoint: Endpoint

    def server(self) -> dict[str, object]:
        """The server's name and version; empty where it does not tell."""

    def models(self) -> list[str] | None:
        """The names of the ready models; None where the server does not list them."""

    def metadata(self, model: str) -> dict[str, object] | None:
        """Inputs and outputs; None where there is no such model. Raises JobError."""

    def shot(self, model: str, metadata: dict[str, object], options: LoadOptions) -> Shot:
        """Requests of the kind that is asked for, one of them tried. Raises JobError."""

    def snapshot(self, model: str) -> Snapshot | None:
        """The server's own counters; None where it has none or does not answer just now."""

    def close(self) -> None: ...


def open_scout(options: LoadOptions) -> Scout:
    """The scout for the protocol that the URL or the options name. Raises UsageError and JobError."""
    endpoint = find_endpoint(wire_url(options.url, options.protocol))
    if endpoint.is_grpc:
        from convoy.loadtest.grpc_scout import GrpcScout

        return GrpcScout(endpoint, options)
    from convoy.loadtest.http_scout import HttpScout

    return HttpScout(endpoint, options)


def find_target(scout: Scout, options: LoadOptions) -> Target:
    """Raises UsageError where --model is needed, JobError where the server cannot be tested as asked."""
    server, endpoint = scout.server(), scout.endpoint
    model = options.model or _only_model(scout.models(), endpoint.url, bool(server))
    metadata = scout.metadata(model)
    if metadata is None:
        raise _no_such_model(model, scout.models(), endpoint.url, bool(server))
    shot = scout.shot(model, metadata, options)
    return Target(endpoint, model, shot.kind, shot.ammunition, server, metadata)


def inputs_of(metadata: dict[str, object]) -> list[bodies.Input]:
    """The inputs that the metadata describes. Raises JobError where it does not."""
    rows = metadata.get("inputs")
    try:
        if not isinstance(rows, list) or not rows:
            raise ValueError("no inputs")
        return [bodies.Input(str(row["name"]), str(row["datatype"]), tuple(map(int, row["shape"]))) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise JobError(f"the server's metadata cannot be used ({error}); use --body image for an image model") from None


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


def without_protocol(url: str) -> JobError:
    """Somebody answers, but not as an inference server would."""
    return JobError(
        f"{url} does not speak the Open Inference Protocol (it has neither server metadata nor a list of models); "
        "check --url and --protocol"
    )
