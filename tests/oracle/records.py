"""What a corpus and its answers are, and how they are kept in a file. Knows nothing of sockets and servers."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

# In a corpus' options and arguments: the folder that it lies in.
FOLDER = "{folder}"


@dataclass(frozen=True, slots=True)
class HttpAsk:
    """Bytes for an HTTP port, and how many answers they deserve.

    "kept": on the connection that the asks before used, as long as that holds. "fresh": on one of its own, whose state
    after the last answer counts as well. "broken": on one of its own, where whatever comes is the answer; when
    nothing more comes, the client says that it has finished. A piece is sent after the one before has had time to be
    read; `after_s` is waited for before the first.
    """

    name: str
    pieces: tuple[bytes, ...]
    connection: Literal["kept", "fresh", "broken"] = "kept"
    replies: int = 1
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GrpcAsk:
    """One call: serialised messages, several for a stream. `metadata` are names and values in turn."""

    name: str
    method: str
    messages: tuple[bytes, ...]
    metadata: tuple[str, ...] = ()
    timeout_s: float = 60.0
    is_stream: bool = False
    is_compressed: bool = False
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RegionAsk:
    """What lies in a region of shared memory now."""

    name: str
    region: str


@dataclass(frozen=True, slots=True)
class CommandAsk:
    """A `convoy` command that ends by itself: its exit code and what it writes."""

    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CrowdAsk:
    """Connections that are opened and held, so that the ask after meets a full server; none of them is answered."""

    name: str
    connections: int


Ask = HttpAsk | GrpcAsk | RegionAsk | CommandAsk | CrowdAsk
_KINDS: dict[str, type] = {kind.__name__: kind for kind in get_args(Ask)}


@dataclass(frozen=True, slots=True)
class Setup:
    """A server and what it is asked, in order. `store` and `files` lie in the corpus' folder; None: the demo.

    `regions` are shared memory that exists while the server runs. Without a server only commands are run.
    """

    name: str
    options: tuple[str, ...]
    store: str | None
    asks: tuple[Ask, ...]
    regions: tuple[tuple[str, bytes], ...] = ()
    has_server: bool = True


@dataclass(frozen=True, slots=True)
class Part:
    """One answer: what comes before the body, line by line, and the body."""

    head: str
    body: bytes = b""


Answer = tuple[Part, ...]
# By setup and ask: "routes/GET v2".
Answers = dict[str, Answer]


def names(setups: tuple[Setup, ...]) -> Iterator[tuple[str, Setup, Ask]]:
    """Every ask with the name that its answer has."""
    for setup in setups:
        for ask in setup.asks:
            yield f"{setup.name}/{ask.name}", setup, ask


def save_corpus(setups: tuple[Setup, ...], folder: Path) -> None:
    """Next to the stores that it names. What several setups are asked is written once."""
    lists = list(dict.fromkeys(setup.asks for setup in setups))
    own = [_written(dataclasses.replace(setup, asks=())) | {"asks": lists.index(setup.asks)} for setup in setups]
    document = {"asks": [_written(asks) for asks in lists], "setups": own}
    (folder / "corpus.json").write_text(json.dumps(document))


def load_corpus(folder: Path) -> tuple[Setup, ...]:
    document = json.loads((folder / "corpus.json").read_text())
    lists = [_value(asks) for asks in document["asks"]]
    return tuple(
        dataclasses.replace(_read(Setup, {**one, "asks": []}), asks=lists[one["asks"]]) for one in document["setups"]
    )


def _written(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return [_written(one) for one in value]
    if dataclasses.is_dataclass(value):
        fields = {field.name: _written(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    return value


def _read(kind: type, fields: dict[str, Any]) -> Any:
    known = get_type_hints(kind)
    return kind(**{name: _value(value) for name, value in fields.items() if name in known})


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_value(one) for one in value)
    if isinstance(value, dict):
        return base64.b64decode(value["base64"]) if "base64" in value else _read(_KINDS[value["kind"]], value)
    return value
