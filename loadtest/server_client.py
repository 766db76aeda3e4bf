"""What a run asks of its server beside the load: how each protocol is asked is in `http_client` and `grpc_client`.

Knows the questions and what the protocols' metadata have in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from convoy.loadtest import bodies
from convoy.loadtest.endpoint import Endpoint
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.request_pool import RequestPool
from convoy.loadtest.server_side import Snapshot
from convoy.loadtest.server_use import ProcessReading
from convoy.models.errors import JobError

Kind = Literal["image", "binary", "json"]


@dataclass(frozen=True, slots=True)
class TriedRequests:
    """Requests that the server answers, and what kind of body they have."""

    kind: Kind
    pool: RequestPool


class ServerClient(Protocol):
    """Asks one server over one protocol. `close` must be called, because it holds a connection."""

    endpoint: Endpoint

    def server(self) -> dict[str, object]:
        """The server's name and version; empty where it does not tell."""

    def models(self) -> list[str] | None:
        """The names of the ready models; None where the server does not list them."""

    def metadata(self, model: str) -> dict[str, object] | None:
        """Inputs and outputs; None where there is no such model. Raises JobError."""

    def try_requests(self, model: str, metadata: dict[str, object], options: LoadTestOptions) -> TriedRequests:
        """Requests of the kind that is asked for, one of them tried. Raises JobError."""

    def snapshot(self, model: str) -> Snapshot | None:
        """The server's own counters; None where it has none or does not answer just now."""

    def processes(self) -> tuple[ProcessReading, ...]:
        """What its processes have used so far; none where it does not tell, or does not answer at once."""

    def close(self) -> None: ...


def inputs_of(metadata: dict[str, object]) -> list[bodies.Input]:
    """The inputs that the metadata describes. Raises JobError where it does not."""
    rows = metadata.get("inputs")
    try:
        if not isinstance(rows, list) or not rows:
            raise ValueError("no inputs")
        return [bodies.Input(str(row["name"]), str(row["datatype"]), tuple(map(int, row["shape"]))) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise JobError(f"the server's metadata cannot be used ({error}); use --body image for an image model") from None


def without_protocol(url: str) -> JobError:
    """Somebody answers, but not as an inference server would."""
    return JobError(
        f"{url} does not speak the Open Inference Protocol (it has neither server metadata nor a list of models); "
        "check --url and --protocol"
    )
