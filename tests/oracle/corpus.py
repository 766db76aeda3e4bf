"""The corpus: which servers are started, from which stores, and what each is asked.

Most requests come from the suite's own generators and tables; what these lack is written out here and beside.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tritonclient.grpc import service_pb2 as pb

from tests.e2e import test_bad_input as bad
from tests.oracle import asks_spoiled, asks_tensors
from tests.oracle.asks_grpc import add_sub, grpc_calls
from tests.oracle.asks_images import images
from tests.oracle.asks_routes import DIGITS, SIMPLE, errors, framing, headers, in_chunks, routes, row
from tests.oracle.session import Ask, among, call, command, fresh, get, pause, post, raw, request, stream
from tests.support import onnx_models
from tests.support.stores import StoreFolder, digit

_KEY, _TOKEN = "open sesame", "the admin's"
_ZEROS = row([0, 0, 0, 0])
_LOAD, _UNLOAD = pb.RepositoryModelLoadRequest, pb.RepositoryModelUnloadRequest


@dataclass(frozen=True, slots=True)
class Setup:
    """A server and what it is asked. `store` lies in the corpus' folder; None: the demo.

    `regions` are shared memory that exists while the server runs.
    """

    name: str
    options: tuple[str, ...]
    store: str | None
    asks: Callable[[], Iterable[Ask]]
    regions: Mapping[str, bytes] = field(default_factory=dict)


def fill_stores(folder: Path) -> None:
    """Write the stores, and the files that options name, into an empty folder."""
    _fill_main(StoreFolder(folder / "main"))
    _fill_mixed(StoreFolder(folder / "mixed"))
    for name, text in (("key", _KEY), ("token", _TOKEN), ("empty", "")):
        (folder / name).write_text(f"{text}\n")


def _fill_main(store: StoreFolder) -> None:
    for add in (store.add_digits, store.add_add_sub, store.add_nonzero):
        add()
    store.add_shift(1.0)
    onnx_models.picky(store.root / "picky" / "1" / "model.onnx")
    for dtype in onnx_models.ONNX_TYPES:
        store.add_identity(dtype)
        store.add_identity(dtype, (), name=f"scalar_{dtype.lower()}")
        store.add_identity(dtype, (2, "size"), name=f"whole_{dtype.lower()}")


def _fill_mixed(store: StoreFolder) -> None:
    """Versions that can be served and versions that cannot."""
    store.add_digits()
    (store.add_digits(2) / "fp32.onnx").write_bytes(b"cut off")
    store.add_add_sub()
    for by, version in ((1.0, 1), (2.0, 2), (3.0, 10)):
        store.add_shift(by, version=version)
    for folder in ("broken/1", "empty/1", "unnumbered/one"):
        (store.root / folder).mkdir(parents=True)
    (store.root / "broken" / "1" / "model.onnx").write_bytes(b"not a model")
    config = store.add_identity("FP32", name="configured").parents[1] / "config.pbtxt"
    config.write_text('max_batch_size: 4\ninput [{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }]\n')


def _keys() -> list[Ask]:
    """Who is let in where."""
    keys = {
        "none": {},
        "the key": {"authorization": f"Bearer {_KEY}"},
        "the token": {"authorization": f"Bearer {_TOKEN}"},
        "a wrong one": {"authorization": "Bearer guessed"},
        "no scheme": {"authorization": _KEY},
    }
    paths = (
        *("/ping", "/", "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/simple/ready", "/docs"),
        *("/v2/models/simple", "/openapi.json", "/models", "/nowhere"),
    )
    orders = [f"/v2/repository/models/simple/{order}" for order in ("load", "unload", "load")]
    return [
        one
        for who, authorization in keys.items()
        for given in [(f"with {who}", authorization)]
        for one in (
            *(get(path, *given) for path in paths),
            post(DIGITS, digit("seven"), *given),
            post(SIMPLE, bad.simple(), *given),
            *(post(order, b"{}", *given) for order in orders),
            call("ModelInfer", add_sub(), *given),
            stream(f"with {who}", add_sub(), metadata=authorization),
            *(call(method, b"", *given) for method in ("ServerLive", "ServerReady", "ServerMetadata")),
            call("ModelReady", pb.ModelReadyRequest(name="simple"), *given),
            call("RepositoryModelLoad", _LOAD(model_name="simple"), *given),
        )
    ]


def _loading() -> list[Ask]:
    """Models that come and go, and what cannot be asked for."""
    names = ("simple", "shift", "digits", "configured", "broken", "empty", "unnumbered", "nobody", "..", "a%2fb")
    asks = [get("/v2/health/ready", "with nothing loaded")]
    for name in names:
        for order in ("load", "load", "unload", "unload", "load"):
            asks.append(post(f"/v2/repository/models/{name}/{order}", b"", order))
            asks.append(get(f"/v2/models/{name}/ready", f"after {order}"))
        asks.append(post("/v2/repository/index", b"", f"after {name}"))
    load, unload = "/v2/repository/models/shift/load", "/v2/repository/models/shift/unload"
    for config in (
        *({"max_batch_size": 2}, {"max_batch_size": "8"}, {"max_batch_size": 0}, {"max_batch_size": -1}),
        *({"max_batch_size": 1.5}, {"max_batch_size": 64}, {"version_policy": {"all": {}}}, {"version_policy": 1}),
        *({"version_policy": {"specific": {"versions": [1, 10]}}}, {"version_policy": {"specific": {"versions": [7]}}}),
        *({"version_policy": {"latest": {"num_versions": 2}}}, {"instance_group": []}, [], "x"),
        *({"name": "shift", "platform": "x", "backend": "y"}, {"version_policy": {"latest": {}}}),
    ):
        text = json.dumps(config)
        what = f"with {text[:60]}"
        asks += [
            post(load, {"parameters": {"config": text}}, what),
            get("/v2/models/shift", what),
            get("/v2/models/shift/config", what),
            post("/v2/models/shift/infer", _ZEROS, what),
        ]
    for parameters in ({"config": 1}, {"config": "{"}, {"file:1/model.onnx": "x"}, {"other": "x"}, [], "x"):
        asks.append(post(load, {"parameters": parameters}, f"parameters {parameters}"))
    for dependents in (True, False, "yes"):
        document = {"parameters": {"unload_dependents": dependents}}
        asks.append(post(unload, document, f"dependents {dependents}"))
    for name in ("simple", "nobody", "broken", ""):
        for order, message in (("Load", _LOAD), ("Unload", _UNLOAD), ("Load", _LOAD)):
            asks.append(call(f"RepositoryModel{order}", message(model_name=name), f"{name!r}"))
    right, wrong = (
        {"config": pb.ModelRepositoryParameter(**one)}
        for one in ({"string_param": '{"max_batch_size": 3}'}, {"int64_param": 3})
    )
    return [
        *asks,
        call("RepositoryModelLoad", _LOAD(model_name="shift", parameters=right), "with a config"),
        call("ModelConfig", pb.ModelConfigRequest(name="shift"), "as overridden"),
        call("RepositoryModelLoad", _LOAD(model_name="shift", parameters=wrong), "with a wrong config"),
        call("RepositoryIndex", pb.RepositoryIndexRequest(), "at last"),
    ]


def _limits() -> list[Ask]:
    """A server with hardly any room, and clients that are slow."""
    body = digit("seven") + bytes(900_000)
    text = json.dumps(row([0] * 400_000, "FP64"), separators=(",", ":")).encode()
    slow = request("POST", DIGITS, b"", {"Content-Length": "1000"})
    return [
        post(DIGITS, bytes(2 << 20), "larger than a body may be"),
        post(DIGITS, body, "just small enough"),
        raw(f"POST {DIGITS} in chunks", in_chunks(DIGITS, body, 50_000)),
        post(
            *("/v2/models/identity_uint8/infer", bytes(1_000_000), "answered as large as asked"),
            {"Inference-Header-Content-Length": "0"},
        ),
        post("/v2/models/identity_fp64/infer", text, "larger as numbers than as text"),
        fresh(f"POST {DIGITS} whose body does not come", slow),
        fresh(f"POST {DIGITS} whose body ends early", slow + bytes(500)),
        fresh("GET /v2 whose headers do not end", b"GET /v2 HTTP/1.1\r\nHost: x\r\n"),
        fresh("nothing at all", b"\r\n"),
        among(14, fresh("GET /v2 when all connections are taken", request("GET", "/v2"))),
        pause(0.5),
        get("/v2/health/ready", "at last"),
    ]


def _late() -> list[Ask]:
    """Requests without a deadline, where the default is over at once."""
    return [
        *(
            one
            for path, body in ((DIGITS, digit("seven")), (SIMPLE, bad.simple()))
            for one in (post(path, body, "by default"), post(f"{path}?timeout_ms=60000", body, "with time"))
        ),
        post(SIMPLE, bad.simple(parameters={"timeout": 60_000_000}), "with a latest start"),
        call("ModelInfer", add_sub(), "with a deadline of its own"),
        post(DIGITS, bad.form((bad.FILE, digit("one")), (bad.FILE, digit("two"))), "two files", bad.FORM),
    ]


def _books() -> list[Ask]:
    """A few calls of every outcome one after the other, and then what the server says of them."""
    right = [
        post(DIGITS, digit("seven"), "answered"),
        post(SIMPLE, bad.simple(), "answered"),
        call("ModelInfer", add_sub(), "answered"),
    ]
    return [
        *right * 3,
        post(DIGITS, b"no image", "invalid"),
        post(SIMPLE, b"{", "invalid"),
        post("/v2/models/nobody/infer", b"{}", "not found"),
        call("ModelInfer", add_sub(model_name="nobody"), "not found"),
        post(f"{SIMPLE}?timeout_ms=0.001", bad.simple(), "late"),
        post("/v2/models/picky/infer", row([1, 2, 3]), "failed"),
        post(DIGITS, bytes(5 << 20), "too large"),
        pause(1.0),  # every call has ended and been counted
        *(get(path) for path in ("/metrics", "/stats", "/v2/models/stats")),
        *(
            one
            for model in ("digits", "simple", "picky", "nobody")
            for one in (
                get(f"/v2/models/{model}/stats"),
                get(f"/v2/models/{model}/versions/1/stats"),
                call("ModelStatistics", pb.ModelStatisticsRequest(name=model), model),
            )
        ),
        call("ModelStatistics", pb.ModelStatisticsRequest(), "of all"),
        call("ModelStatistics", pb.ModelStatisticsRequest(name="simple", version="7"), "of no version"),
    ]


def _versions() -> list[Ask]:
    """Which versions are served."""
    asks = [*(get(path) for path in ("/v2/health/ready", "/v2", "/models")), post("/v2/repository/index")]
    for name in ("digits", "shift", "configured", "broken", "empty"):
        for version in ("", "/versions/1", "/versions/2", "/versions/10"):
            asks += [get(f"/v2/models/{name}{version}{rest}") for rest in ("", "/config", "/ready")]
            asks.append(post(f"/v2/models/{name}{version}/infer", _ZEROS))
        asks.append(get(f"/models/{name}/all"))
    for version in ("", "1", "2", "10"):
        asks.append(call("ModelMetadata", pb.ModelMetadataRequest(name="shift", version=version), version))
    return [*asks, post("/v2/repository/models/shift/load", b"{}")]


def _commands() -> list[Ask]:
    """Commands that end by themselves: wrong calls of `serve`, and what shows a store."""
    wrong = (
        *(("--max-queue", "0"), ("--no-such-option",), ("--max-body-mb", "9", "--max-inflight-mb", "8")),
        *(("--version-policy", "newest"), ("--load-model", "a"), ("--engine", "abacus"), ("--store", "nowhere")),
        *(("--api-key-file", "nowhere"), ("--admin-token-file", "empty")),
    )
    return [
        *(command("serve", "--port", "0", "--grpc-port", "-1", *options) for options in wrong),
        *(command("inspect", *names, "--store", "mixed") for names in ((), ("shift",), ("nobody",))),
        command("predict", "digits", "nowhere.png", "--url", "http://127.0.0.1:9"),
        command("no-such-command"),
    ]


# One engine: no answer depends on what this machine finds fastest.
_STEADY = ("--engine", "cpu", "--precision", "fp32", "--threads", "1", "--plan-cache", "plans")
_ROOM = (*_STEADY, "--access-log", "off", "--max-body-mb", "4", "--max-inflight-mb", "64")
_COMMON = (*_ROOM, "--max-batch", "32", "--allow-shared-memory")
_EXPLICIT = (*_STEADY, "--model-control", "explicit", "--max-body-mb", "4", "--max-inflight-mb", "64")
_SECURED = ("--api-key-file", "key", "--admin-token-file", "token", "--load-model", "simple,digits")
_NARROW = (
    *(*_STEADY, "--max-body-mb", "1", "--max-inflight-mb", "3", "--max-queue", "1", "--max-connections", "12"),
    *("--header-timeout-s", "0.6", "--body-timeout-s", "0.6", "--write-timeout-s", "5", "--access-log", "all"),
)
# Two comparisons at once must not share memory.
_SPOILED, _IN, _OUT = (f"convoy-oracle-{os.getpid()}-{use}" for use in ("spoiled", "in", "out"))
_GRPC_IN, _GRPC_OUT = f"{_IN}-grpc", f"{_OUT}-grpc"
_EMPTY = bytes(asks_tensors.REGION_BYTES)

SETUPS = (
    Setup(
        *("spoiled", _COMMON, "main", partial(asks_spoiled.spoiled, _SPOILED)),
        regions={_SPOILED: bytes(asks_spoiled.REGION_BYTES)},
    ),
    Setup("routes", _COMMON, "main", routes),
    Setup("headers", _COMMON, "main", headers),
    Setup("framing", _COMMON, "main", framing),
    Setup("errors", _COMMON, "main", errors),
    Setup(
        *("tensors", _COMMON, "main", partial(asks_tensors.tensors, _IN, _OUT)),
        regions={_IN: asks_tensors.input_region(), _OUT: _EMPTY},
    ),
    Setup(
        *("grpc", _COMMON, "main", partial(grpc_calls, _GRPC_IN, _GRPC_OUT)),
        regions={_GRPC_IN: asks_tensors.input_region(), _GRPC_OUT: _EMPTY},
    ),
    Setup("images", (*_ROOM, "--max-batch", "1"), None, images),
    Setup("secured", (*_EXPLICIT, *_SECURED), "mixed", _keys),
    Setup("explicit", (*_EXPLICIT, "--host", "127.0.0.1"), "mixed", _loading),
    Setup("narrow", _NARROW, "main", _limits),
    Setup("hurried", (*_STEADY, "--default-timeout-ms", "0.001"), "main", _late),
    Setup("books", _COMMON, "main", _books),
    Setup("latest", (*_STEADY, "--drain-delay-s", "0.2", "--drain-timeout-s", "5"), "mixed", _versions),
    Setup("all", (*_STEADY, "--version-policy", "all", "--server-name", "triton"), "mixed", _versions),
    Setup("first", (*_STEADY, "--version-policy", "1,9"), "mixed", _versions),
    Setup("polling", (*_STEADY, "--model-control", "poll", "--poll-interval-s", "600"), "mixed", _versions),
    Setup("commands", _STEADY, "mixed", _commands),
)
