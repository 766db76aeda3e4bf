"""The corpus: which servers are started, from which stores, and what each is asked.

Most requests come from the suite's own generators and tables; what these lack is written out here and beside.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from tests.e2e import test_bad_input as bad
from tests.oracle import asks_spoiled, asks_tensors
from tests.oracle.asks_grpc import add_sub, grpc_calls
from tests.oracle.asks_images import images
from tests.oracle.asks_routes import DIGITS, SIMPLE, errors, framing, headers, routes, row
from tests.oracle.session import Session, request
from tests.support import onnx_models
from tests.support.stores import StoreFolder, digit
from tests.support.wire import Wire, chunk


@dataclass(frozen=True, slots=True)
class Setup:
    """A server and what it is asked. `store` lies in the corpus' folder; None: the demo.

    `regions` are shared memory that exists while the server runs.
    """

    name: str
    options: tuple[str, ...]
    store: str | None
    play: Callable[[Session], None]
    regions: Mapping[str, bytes] = field(default_factory=dict)


def fill_stores(folder: Path) -> None:
    """Write the stores, and the files that options name, into an empty folder."""
    _fill_main(StoreFolder(folder / "main"))
    _fill_mixed(StoreFolder(folder / "mixed"))
    (folder / "key").write_text(f"{_KEY}\n")
    (folder / "token").write_text(f"{_TOKEN}\n")
    (folder / "empty").write_text("\n")


def _fill_main(store: StoreFolder) -> None:
    store.add_digits()
    store.add_add_sub()
    store.add_nonzero()
    store.add_shift(1.0)
    _add_picky(store)
    for dtype in onnx_models.ONNX_TYPES:
        store.add_identity(dtype)
        store.add_identity(dtype, (), name=f"scalar_{dtype.lower()}")
        store.add_identity(dtype, (2, "size"), name=f"whole_{dtype.lower()}")


def _fill_mixed(store: StoreFolder) -> None:
    """Versions that can be served and versions that cannot."""
    store.add_digits()
    (store.add_digits(2) / "fp32.onnx").write_bytes(b"cut off")
    store.add_add_sub()
    store.add_shift(1.0)
    store.add_shift(2.0, version=2)
    store.add_shift(3.0, version=10)
    for folder in ("broken/1", "empty/1", "unnumbered/one"):
        (store.root / folder).mkdir(parents=True)
    (store.root / "broken" / "1" / "model.onnx").write_bytes(b"not a model")
    config = store.add_identity("FP32", name="configured").parents[1] / "config.pbtxt"
    config.write_text('max_batch_size: 4\ninput [{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }]\n')


def _add_picky(store: StoreFolder) -> None:
    """Adds a row of four, so that rows of one or four are answered, and others fail inside the model."""
    from onnx import TensorProto, helper, numpy_helper, save

    path = store.root / "picky" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    four = numpy_helper.from_array(np.arange(4, dtype=np.float32), "row")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "size"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "any"])
    graph = helper.make_graph([helper.make_node("Add", ["x", "row"], ["y"])], "picky", [x], [y], [four])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(path))


def _keys(session: Session) -> None:
    """Who is let in where."""
    for who, authorization in {
        "none": {},
        "the key": {"authorization": f"Bearer {_KEY}"},
        "the token": {"authorization": f"Bearer {_TOKEN}"},
        "a wrong one": {"authorization": "Bearer guessed"},
        "no scheme": {"authorization": _KEY},
    }.items():
        given = (f"with {who}", authorization)
        for path in (
            *("/ping", "/", "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/simple/ready", "/docs"),
            *("/v2/models/simple", "/openapi.json", "/models", "/nowhere"),
        ):
            session.get(path, *given)
        session.post(DIGITS, digit("seven"), *given)
        session.post(SIMPLE, bad.simple(), *given)
        for task in ("load", "unload", "load"):
            session.post(f"/v2/repository/models/simple/{task}", b"{}", *given)
        session.call("ModelInfer", add_sub(), *given)
        session.stream(f"with {who}", add_sub(), metadata=authorization)
        for method in ("ServerLive", "ServerReady", "ServerMetadata"):
            session.call(method, b"", *given)
        session.call("ModelReady", pb.ModelReadyRequest(name="simple"), *given)
        session.call("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="simple"), *given)


def _loading(session: Session) -> None:
    """Models that come and go, and what cannot be asked for."""
    session.get("/v2/health/ready", "with nothing loaded")
    for name in ("simple", "shift", "digits", "configured", "broken", "empty", "unnumbered", "nobody", "..", "a%2fb"):
        for task in ("load", "load", "unload", "unload", "load"):
            session.post(f"/v2/repository/models/{name}/{task}", b"", task)
            session.get(f"/v2/models/{name}/ready", f"after {task}")
        session.post("/v2/repository/index", b"", f"after {name}")
    for config in (
        *({"max_batch_size": 2}, {"max_batch_size": "8"}, {"max_batch_size": 0}, {"max_batch_size": -1}),
        *({"max_batch_size": 1.5}, {"max_batch_size": 64}, {"version_policy": {"all": {}}}, {"version_policy": 1}),
        *({"version_policy": {"specific": {"versions": [1, 10]}}}, {"version_policy": {"specific": {"versions": [7]}}}),
        *({"version_policy": {"latest": {"num_versions": 2}}}, {"instance_group": []}, [], "x"),
        *({"name": "shift", "platform": "x", "backend": "y"}, {"version_policy": {"latest": {}}}),
    ):
        text = json.dumps(config)
        what = f"with {text[:60]}"
        session.post("/v2/repository/models/shift/load", {"parameters": {"config": text}}, what)
        session.get("/v2/models/shift", what)
        session.get("/v2/models/shift/config", what)
        session.post("/v2/models/shift/infer", _ZEROS, what)
    for parameters in ({"config": 1}, {"config": "{"}, {"file:1/model.onnx": "x"}, {"other": "x"}, [], "x"):
        session.post("/v2/repository/models/shift/load", {"parameters": parameters}, f"parameters {parameters}")
    for dependents in (True, False, "yes"):
        document = {"parameters": {"unload_dependents": dependents}}
        session.post("/v2/repository/models/shift/unload", document, f"dependents {dependents}")
    for name in ("simple", "nobody", "broken", ""):
        for task in ("Load", "Unload", "Load"):
            message = getattr(pb, f"RepositoryModel{task}Request")(model_name=name)
            session.call(f"RepositoryModel{task}", message, f"{name!r}")
    message = pb.RepositoryModelLoadRequest(model_name="shift")
    message.parameters["config"].string_param = '{"max_batch_size": 3}'
    session.call("RepositoryModelLoad", message, "with a config")
    session.call("ModelConfig", pb.ModelConfigRequest(name="shift"), "as overridden")
    message.parameters["config"].int64_param = 3
    session.call("RepositoryModelLoad", message, "with a wrong config")
    session.call("RepositoryIndex", pb.RepositoryIndexRequest(), "at last")


def _limits(session: Session) -> None:
    """A server with hardly any room, and clients that are slow."""
    session.post(DIGITS, bytes(2 << 20), "larger than a body may be")
    body = digit("seven") + bytes(900_000)
    session.post(DIGITS, body, "just small enough")
    chunks = b"".join(chunk(body[start : start + 50_000]) for start in range(0, len(body), 50_000)) + chunk(b"")
    session.raw(f"POST {DIGITS} in chunks", request("POST", DIGITS, chunks, {"Transfer-Encoding": "chunked"}))
    raw = {"Inference-Header-Content-Length": "0"}
    session.post("/v2/models/identity_uint8/infer", bytes(1_000_000), "answered as large as asked", raw)
    text = json.dumps(row([0] * 400_000, "FP64"), separators=(",", ":")).encode()
    session.post("/v2/models/identity_fp64/infer", text, "larger as numbers than as text")
    slow = request("POST", DIGITS, b"", {"Content-Length": "1000"})
    session.fresh(f"POST {DIGITS} whose body does not come", slow)
    session.fresh(f"POST {DIGITS} whose body ends early", slow + bytes(500))
    session.fresh("GET /v2 whose headers do not end", b"GET /v2 HTTP/1.1\r\nHost: x\r\n")
    session.fresh("nothing at all", b"\r\n")
    with ExitStack() as crowd:
        for _ in range(14):
            crowd.enter_context(Wire(session.port))
        session.fresh("GET /v2 when all connections are taken", request("GET", "/v2"))
    time.sleep(0.5)
    session.get("/v2/health/ready", "at last")


def _late(session: Session) -> None:
    """Whoever gives no deadline has no time."""
    for path, body in ((DIGITS, digit("seven")), (SIMPLE, bad.simple())):
        session.post(path, body, "by default")
        session.post(f"{path}?timeout_ms=60000", body, "with time")
    session.post(SIMPLE, bad.simple(parameters={"timeout": 60_000_000}), "with a latest start")
    session.call("ModelInfer", add_sub(), "with a deadline of its own")
    session.post(DIGITS, bad.form((bad.FILE, digit("one")), (bad.FILE, digit("two"))), "two files", bad.FORM)


def _books(session: Session) -> None:
    """A few calls of every outcome one after the other, and then what the server says of them."""
    for _ in range(3):
        session.post(DIGITS, digit("seven"), "answered")
        session.post(SIMPLE, bad.simple(), "answered")
        session.call("ModelInfer", add_sub(), "answered")
    session.post(DIGITS, b"no image", "invalid")
    session.post(SIMPLE, b"{", "invalid")
    session.post("/v2/models/nobody/infer", b"{}", "not found")
    session.call("ModelInfer", add_sub(model_name="nobody"), "not found")
    session.post(f"{SIMPLE}?timeout_ms=0.001", bad.simple(), "late")
    session.post("/v2/models/picky/infer", row([1, 2, 3]), "failed")
    session.post(DIGITS, bytes(5 << 20), "too large")
    time.sleep(1.0)  # every call has ended and been counted
    for path in ("/metrics", "/stats", "/v2/models/stats"):
        session.get(path)
    for model in ("digits", "simple", "picky", "nobody"):
        session.get(f"/v2/models/{model}/stats")
        session.get(f"/v2/models/{model}/versions/1/stats")
        session.call("ModelStatistics", pb.ModelStatisticsRequest(name=model), model)
    session.call("ModelStatistics", pb.ModelStatisticsRequest(), "of all")
    session.call("ModelStatistics", pb.ModelStatisticsRequest(name="simple", version="7"), "of no version")


def _versions(session: Session) -> None:
    """Which versions are served."""
    for path in ("/v2/health/ready", "/v2", "/models"):
        session.get(path)
    session.post("/v2/repository/index")
    for name in ("digits", "shift", "configured", "broken", "empty"):
        for version in ("", "/versions/1", "/versions/2", "/versions/10"):
            for rest in ("", "/config", "/ready"):
                session.get(f"/v2/models/{name}{version}{rest}")
            session.post(f"/v2/models/{name}{version}/infer", _ZEROS)
        session.get(f"/models/{name}/all")
    for version in ("", "1", "2", "10"):
        session.call("ModelMetadata", pb.ModelMetadataRequest(name="shift", version=version), version)
    session.post("/v2/repository/models/shift/load", b"{}")


def _commands(session: Session) -> None:
    """Commands that end by themselves: wrong calls of `serve`, and what shows a store."""
    for options in (
        *(("--max-queue", "0"), ("--no-such-option",), ("--max-body-mb", "9", "--max-inflight-mb", "8")),
        *(("--version-policy", "newest"), ("--load-model", "a"), ("--engine", "abacus"), ("--store", "nowhere")),
        *(("--api-key-file", "nowhere"), ("--admin-token-file", "empty")),
    ):
        session.command("serve", "--port", "0", "--grpc-port", "-1", *options)
    for names in ((), ("shift",), ("nobody",)):
        session.command("inspect", *names, "--store", "mixed")
    session.command("predict", "digits", "nowhere.png", "--url", "http://127.0.0.1:9")
    session.command("no-such-command")


_KEY, _TOKEN = "open sesame", "the admin's"
_ZEROS = row([0, 0, 0, 0])
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
        *("spoiled", _COMMON, "main", partial(asks_spoiled.spoiled, region=_SPOILED)),
        regions={_SPOILED: bytes(asks_spoiled.REGION_BYTES)},
    ),
    Setup("routes", _COMMON, "main", routes),
    Setup("headers", _COMMON, "main", headers),
    Setup("framing", _COMMON, "main", framing),
    Setup("errors", _COMMON, "main", errors),
    Setup(
        *("tensors", _COMMON, "main", partial(asks_tensors.tensors, regions=(_IN, _OUT))),
        regions={_IN: asks_tensors.input_region(), _OUT: _EMPTY},
    ),
    Setup(
        *("grpc", _COMMON, "main", partial(grpc_calls, regions=(_GRPC_IN, _GRPC_OUT))),
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
