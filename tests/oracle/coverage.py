"""What a corpus touches of all there is: routes, gRPC methods, errors and options. What it leaves out is listed."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tests.oracle.build import Build
from tests.oracle.grpc_player import INFERENCE, METHODS
from tests.oracle.records import Answers, CommandAsk, GrpcAsk, HttpAsk, Setup, names

_OPENAPI = "GET /openapi.json"
_REQUEST_LINE = re.compile(rb"(?m)^([A-Z]+) (\S+) HTTP/1\.[01]\r$")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
# How each error is told by its answer: status over HTTP, code over gRPC, or words. Only those that no other error
# derives from are ever the last word, and an exit code is what tells those that end a command.
_SIGNS = {
    "UsageError": r"exit code 2\b",
    "JobError": r"exit code 1\b",
    "BundleError": r"\"state\": ?\"UNAVAILABLE\"",
    "InvalidRequest": r"\bHTTP/1\.1 400\b",
    "ImageError": r"HTTP/1\.1 400\b(?s:.)*image is broken or cut off",
    "Unauthorized": r"\bHTTP/1\.1 401\b",
    "NotFound": r"\bHTTP/1\.1 404\b",
    "RequestTimeout": r"\bHTTP/1\.1 408\b",
    "BodyTooLarge": r"\bHTTP/1\.1 413\b",
    "Overloaded": r"\bHTTP/1\.1 429\b",
    "ModelFailed": r"\bHTTP/1\.1 500\b",
    "Unsupported": r"\bHTTP/1\.1 501\b",
    "UnsupportedCompression": r"accept-encoding: gzip, deflate",
    "Unavailable": r"\bHTTP/1\.1 503\b",
    "DeadlineExceeded": r"\bHTTP/1\.1 504\b",
}
_ROOTS = frozenset({"ConvoyError", "RequestError"})


@dataclass(frozen=True, slots=True)
class Coverage:
    """Of one kind of thing: all that there is, and what of it was not touched."""

    kind: str
    known: int
    missed: tuple[str, ...]


def measure(after: Build, setups: tuple[Setup, ...], answers: Answers) -> list[Coverage]:
    """By what the build itself says that it has."""
    return [
        _coverage("routes", _routes(answers), _touched_routes(setups, _routes(answers))),
        _coverage("gRPC methods", METHODS, _methods(setups)),
        _coverage("errors", _errors(after), _touched_errors(answers)),
        _coverage("options of convoy serve", _options(after), _given_options(setups)),
    ]


def report(after: Build, setups: tuple[Setup, ...], answers: Answers) -> None:
    for one in measure(after, setups, answers):
        missed = f"; not touched: {', '.join(one.missed)}" if one.missed else ""
        print(f"{one.known - len(one.missed)} of {one.known} {one.kind}{missed}")


def _coverage(kind: str, known: Iterable[str], touched: set[str]) -> Coverage:
    all_of_them = sorted(set(known))
    return Coverage(kind, len(all_of_them), tuple(one for one in all_of_them if one not in touched))


def _routes(answers: Answers) -> list[str]:
    found = [answer for name, answer in answers.items() if name.endswith(_OPENAPI)]
    if not found:
        return []
    paths = json.loads(found[0][0].body)["paths"]
    return [f"{method.upper()} {path}" for path, operations in paths.items() for method in operations]


def _touched_routes(setups: tuple[Setup, ...], routes: list[str]) -> set[str]:
    asked = set()
    for _, _, ask in names(setups):
        if isinstance(ask, HttpAsk):
            asked |= {(line[1], line[2].partition(b"?")[0]) for line in _REQUEST_LINE.finditer(b"".join(ask.pieces))}
    touched = set()
    # A path without a name in it is itself, and not somebody's name.
    by_names = sorted(routes, key=lambda route: route.count("{"))
    for method, path in asked:
        for route in by_names:
            own_method, own_path = route.split(" ")
            pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(own_path))
            if own_method == method.decode() and re.fullmatch(pattern, path.decode("latin-1")):
                touched.add(route)
                break
    return touched


def _methods(setups: tuple[Setup, ...]) -> set[str]:
    return {ask.method.removeprefix(INFERENCE) for _, _, ask in names(setups) if isinstance(ask, GrpcAsk)}


def _errors(build: Build) -> list[str]:
    """The classes of the tree of errors, wherever the build has it."""
    places = [build.tree / path for path in ("models/errors.py", "convoy/models/errors.py")]
    tree = ast.parse(next(path for path in places if path.exists()).read_text())
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name not in _ROOTS]


def _touched_errors(answers: Answers) -> set[str]:
    touched = set()
    for answer in answers.values():
        for part in answer:
            text = f"{part.head}\n{part.body[:4000].decode('latin-1')}"
            touched |= {name for name, sign in _SIGNS.items() if name not in touched and re.search(sign, text)}
    return touched


def _options(build: Build) -> set[str]:
    return set(_OPTION.findall(build.run("serve", "--help").stdout.decode())) - {"--help"}


def _given_options(setups: tuple[Setup, ...]) -> set[str]:
    given = {"--port", "--grpc-port"} | {"--store" for setup in setups if setup.store is not None}
    for setup in setups:
        given |= set(setup.options)
    for _, _, ask in names(setups):
        if isinstance(ask, CommandAsk) and ask.arguments[0] == "serve":
            given |= set(ask.arguments)
    return given
