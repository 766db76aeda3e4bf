"""The corpus: which servers are started, from which stores, and what each is asked.

Everything comes from the suite's own generators and tables; what they lack is written out here and beside. A corpus is
made once per comparison, by the newer tree.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from tests.e2e import test_bad_input as bad
from tests.oracle.asks_grpc import add_sub, grpc_calls
from tests.oracle.asks_images import images
from tests.oracle.asks_routes import DIGITS, SIMPLE, framing, headers, routes, tables_of_errors
from tests.oracle.asks_spoiled import spoiled
from tests.oracle.asks_tensors import OUTPUT_BYTES, input_region, tensors
from tests.oracle.book import Book, request
from tests.oracle.records import FOLDER, Setup, save_corpus
from tests.support import onnx_models
from tests.support.stores import StoreFolder, digit
from tests.support.wire import chunk

SHOTS = 3000
_FUZZ_BYTES = 4096
# Of the engines one, and of batches one: no answer depends on what this machine finds fastest.
_STEADY = ("--engine", "cpu", "--precision", "fp32", "--threads", "1", "--plan-cache", f"{FOLDER}/plans")
_QUIET = ("--access-log", "off", "--log-level", "info")
_LIMITS = ("--max-body-mb", "4", "--max-inflight-mb", "64")
_HURRIED = (*_STEADY, *_QUIET, "--default-timeout-ms", "0.001")
_KEY, _TOKEN = "open sesame", "the admin's"
_SHIFT = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [0, 0, 0, 0]}]}


def record(folder: Path, seed: int) -> None:
    """Write the corpus and its stores into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _fill_main(StoreFolder(folder / "main"))
    _fill_mixed(StoreFolder(folder / "mixed"))
    (folder / "key").write_text(f"{_KEY}\n")
    (folder / "token").write_text(f"{_TOKEN}\n")
    (folder / "empty").write_text("\n")
    # Two comparisons at once must not share memory.
    save_corpus(setups(seed, f"convoy-oracle-{secrets.token_hex(4)}"), folder)


def setups(seed: int, own: str) -> tuple[Setup, ...]:
    """Every server, and the commands that are none. `own` begins the names of shared memory."""
    common = (*_STEADY, *_QUIET, *_LIMITS, "--max-batch", "32", "--allow-shared-memory")
    alone = (*_STEADY, *_QUIET, *_LIMITS, "--max-batch", "1")
    region = f"{own}-spoiled"
    shots = spoiled(seed, region, _FUZZ_BYTES, SHOTS)
    return (
        Setup("spoiled", common, "main", shots.asks, ((region, bytes(_FUZZ_BYTES)),)),
        Setup("routes", common, "main", routes().asks),
        Setup("headers", common, "main", headers().asks),
        Setup("framing", common, "main", framing().asks),
        Setup("errors", common, "main", tables_of_errors().asks),
        _with_regions("tensors", common, tensors, f"{own}-tensors"),
        _with_regions("grpc", common, grpc_calls, f"{own}-grpc"),
        Setup("images", alone, None, images().asks),
        Setup("secured", _secured(), "mixed", _keys().asks),
        Setup("explicit", _explicit(), "mixed", _loading().asks),
        Setup("narrow", _narrow(), "main", _limits().asks),
        Setup("hurried", _HURRIED, "main", _late().asks),
        Setup("books", common, "main", _books().asks),
        *(Setup(name, (*_STEADY, *options), "mixed", _versions().asks) for name, options in _VERSIONS.items()),
        Setup("commands", (), None, _commands().asks, has_server=False),
    )


def _with_regions(name: str, options: tuple[str, ...], asks: Callable[[tuple[str, str]], Book], own: str) -> Setup:
    names = f"{own}-in", f"{own}-out"
    regions = (names[0], input_region()), (names[1], b"\xee" * OUTPUT_BYTES)
    return Setup(name, options, "main", asks(names).asks, regions)


_VERSIONS = {
    "latest": ("--drain-delay-s", "0.2", "--drain-timeout-s", "5"),
    "all": ("--version-policy", "all", "--server-name", "triton", "--host", "127.0.0.1"),
    "first": ("--version-policy", "1,9", "--grpc-port", "-1"),
    "polling": ("--model-control", "poll", "--poll-interval-s", "600"),
}


def _secured() -> tuple[str, ...]:
    files = ("--api-key-file", f"{FOLDER}/key", "--admin-token-file", f"{FOLDER}/token")
    return (*_STEADY, *_LIMITS, *files, "--model-control", "explicit", "--load-model", "simple,digits")


def _explicit() -> tuple[str, ...]:
    return (*_STEADY, *_LIMITS, "--model-control", "explicit", "--host", "127.0.0.1")


def _narrow() -> tuple[str, ...]:
    waits = ("--header-timeout-s", "0.6", "--body-timeout-s", "0.6", "--write-timeout-s", "5")
    few = ("--max-body-mb", "1", "--max-inflight-mb", "3", "--max-queue", "1", "--max-connections", "12")
    return (*_STEADY, *waits, *few, "--access-log", "all")


def _fill_main(store: StoreFolder) -> None:
    store.add_digits()
    store.add_add_sub()
    store.add_mean()
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
    (store.root / "broken" / "1").mkdir(parents=True)
    (store.root / "broken" / "1" / "model.onnx").write_bytes(b"not a model")
    (store.root / "empty" / "1").mkdir(parents=True)
    (store.root / "unnumbered" / "one").mkdir(parents=True)
    config = store.add_identity("FP32", name="configured").parents[1] / "config.pbtxt"
    config.write_text('max_batch_size: 4\ninput [{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }]\n')


def _add_picky(store: StoreFolder) -> None:
    """Adds a row of four, so that rows of one or four are answered, and others fail inside the model."""
    from onnx import TensorProto, helper, numpy_helper, save

    path = store.root / "picky" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    row = numpy_helper.from_array(np.arange(4, dtype=np.float32), "row")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "size"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "any"])
    graph = helper.make_graph([helper.make_node("Add", ["x", "row"], ["y"])], "picky", [x], [y], [row])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(path))


def _keys() -> Book:
    """Who is let in where."""
    book = Book()
    given = {"none": None, "the key": _KEY, "the token": _TOKEN, "a wrong one": "guessed", "no scheme": ""}
    for who, secret in given.items():
        authorization = {} if secret is None else {"Authorization": f"Bearer {secret}" if secret else _KEY}
        metadata = tuple(part for name, value in authorization.items() for part in (name.lower(), value))
        for path in ("/ping", "/", "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/simple/ready", "/docs"):
            book.get(path, f"with {who}", authorization)
        for path in ("/v2/models/simple", "/openapi.json", "/models", "/nowhere"):
            book.get(path, f"with {who}", authorization)
        book.post(DIGITS, digit("seven"), f"with {who}", authorization)
        book.post(SIMPLE, bad.simple(), f"with {who}", authorization)
        for task in ("load", "unload", "load"):
            book.post(f"/v2/repository/models/simple/{task}", b"{}", f"with {who}", authorization)
        book.call("ModelInfer", add_sub(), f"with {who}", metadata)
        book.stream(f"with {who}", add_sub(), metadata=metadata)
        for method in ("ServerLive", "ServerReady", "ServerMetadata"):
            book.call(method, getattr(pb, f"{method}Request")(), f"with {who}", metadata)
        book.call("ModelReady", pb.ModelReadyRequest(name="simple"), f"with {who}", metadata)
        book.call("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="simple"), f"with {who}", metadata)
    return book


def _loading() -> Book:
    """Models that come and go, and what cannot be asked for."""
    book = Book()
    book.get("/v2/health/ready", "with nothing loaded")
    book.post("/v2/repository/index", b"", "at first")
    book.post("/v2/repository/index", b'{"ready": true}', "at first")
    for name in ("simple", "shift", "digits", "configured", "broken", "empty", "unnumbered", "nobody", "..", "a%2fb"):
        for task in ("load", "load", "unload", "unload", "load"):
            book.post(f"/v2/repository/models/{name}/{task}", b"", task)
            book.get(f"/v2/models/{name}/ready", f"after {task}")
        book.post("/v2/repository/index", b"", f"after {name}")
    for config in (
        *({"max_batch_size": 2}, {"max_batch_size": "8"}, {"max_batch_size": 0}, {"max_batch_size": -1}),
        *({"max_batch_size": 1.5}, {"max_batch_size": 64}, {"version_policy": {"all": {}}}),
        *({"version_policy": {"specific": {"versions": [1, 10]}}}, {"version_policy": {"specific": {"versions": [7]}}}),
        *({"version_policy": {"latest": {"num_versions": 2}}}, {"version_policy": 1}, {"instance_group": []}, [], "x"),
        *({"name": "shift", "platform": "x", "backend": "y"}, {"version_policy": {"latest": {}}}),
    ):
        text = json.dumps(config)
        book.post_json("/v2/repository/models/shift/load", {"parameters": {"config": text}}, f"with {text[:60]}")
        book.get("/v2/models/shift", f"with {text[:60]}")
        book.get("/v2/models/shift/config", f"with {text[:60]}")
        book.post_json("/v2/models/shift/infer", _SHIFT, f"with {text[:60]}")
    for parameters in ({"config": 1}, {"config": "{"}, {"file:1/model.onnx": "x"}, {"other": "x"}, [], "x"):
        book.post_json("/v2/repository/models/shift/load", {"parameters": parameters}, f"parameters {parameters}")
    for dependents in (True, False, "yes"):
        document = {"parameters": {"unload_dependents": dependents}}
        book.post_json("/v2/repository/models/shift/unload", document, f"dependents {dependents}")
    for name in ("simple", "nobody", "broken", ""):
        for task in ("Load", "Unload", "Load"):
            message = getattr(pb, f"RepositoryModel{task}Request")(model_name=name)
            book.call(f"RepositoryModel{task}", message, f"{name!r}")
    message = pb.RepositoryModelLoadRequest(model_name="shift")
    message.parameters["config"].string_param = '{"max_batch_size": 3}'
    book.call("RepositoryModelLoad", message, "with a config")
    book.call("ModelConfig", pb.ModelConfigRequest(name="shift"), "as overridden")
    message.parameters["config"].int64_param = 3
    book.call("RepositoryModelLoad", message, "with a wrong config")
    book.call("RepositoryIndex", pb.RepositoryIndexRequest(), "at last")
    return book


def _limits() -> Book:
    """A server with hardly any room, and clients that are slow."""
    book = Book()
    book.post(DIGITS, bytes(2 << 20), "larger than a body may be")
    body = digit("seven") + bytes(900_000)
    book.post(DIGITS, body, "just small enough")
    chunks = b"".join(chunk(body[start : start + 50_000]) for start in range(0, len(body), 50_000)) + chunk(b"")
    book.raw(f"POST {DIGITS} the same in chunks", request("POST", DIGITS, chunks, {"Transfer-Encoding": "chunked"}))
    raw = {"Inference-Header-Content-Length": "0"}
    book.post("/v2/models/identity_uint8/infer", bytes(1_000_000), "answered as large as asked", raw)
    one = {"name": "x", "shape": [1, 400_000], "datatype": "FP64", "data": [0] * 400_000}
    text = json.dumps({"inputs": [one]}, separators=(",", ":")).encode()
    book.post("/v2/models/identity_fp64/infer", text, "larger as numbers than as text")
    slow = request("POST", DIGITS, b"", {"Content-Length": "1000"})
    book.raw(f"POST {DIGITS} whose body does not come", slow, connection="fresh")
    book.raw(f"POST {DIGITS} whose body ends early", slow + bytes(500), connection="fresh")
    book.raw("GET /v2 whose headers do not end", b"GET /v2 HTTP/1.1\r\nHost: x\r\n", connection="fresh")
    book.raw("nothing at all", b"\r\n", connection="fresh")
    book.crowd(14, "of more connections than there may be")
    book.raw("GET /v2 when all are taken", request("GET", "/v2"), connection="fresh")
    book.crowd(0, "that has left")
    book.get("/v2/health/ready", "at last", after_s=0.5)
    return book


def _late() -> Book:
    """Nobody who says nothing has any time."""
    book = Book()
    book.post(DIGITS, digit("seven"), "by default")
    book.post(f"{DIGITS}?timeout_ms=60000", digit("seven"), "with time")
    book.post(SIMPLE, bad.simple(), "by default")
    book.post(f"{SIMPLE}?timeout_ms=60000", bad.simple(), "with time")
    book.post(SIMPLE, bad.simple(parameters={"timeout": 60_000_000}), "with a latest start")
    book.call("ModelInfer", add_sub(), "with a deadline of its own")
    book.post(DIGITS, bad.form((bad.FILE, digit("one")), (bad.FILE, digit("two"))), "two files", bad.FORM)
    return book


def _books() -> Book:
    """A few calls of every outcome one after the other, and then what the server says of them."""
    book = Book()
    for number in range(3):
        book.post(DIGITS, digit("seven"), f"answered {number}")
        book.post(SIMPLE, bad.simple(), f"answered {number}")
        book.call("ModelInfer", add_sub(), f"answered {number}")
    book.post(DIGITS, b"no image", "invalid")
    book.post(SIMPLE, b"{", "invalid")
    book.post("/v2/models/nobody/infer", b"{}", "not found")
    book.call("ModelInfer", add_sub(model_name="nobody"), "not found")
    book.post(f"{SIMPLE}?timeout_ms=0.001", bad.simple(), "late")
    document = {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}
    book.post_json("/v2/models/picky/infer", document, "failed")
    book.post(DIGITS, bytes(5 << 20), "too large")
    for path in ("/metrics", "/stats", "/v2/models/stats"):
        book.get(path, "", after_s=1.0)  # when every call has ended and been counted
    for model in ("digits", "simple", "picky", "nobody"):
        book.get(f"/v2/models/{model}/stats")
        book.get(f"/v2/models/{model}/versions/1/stats")
        book.call("ModelStatistics", pb.ModelStatisticsRequest(name=model), model)
    book.call("ModelStatistics", pb.ModelStatisticsRequest(), "of all")
    book.call("ModelStatistics", pb.ModelStatisticsRequest(name="simple", version="7"), "of no version")
    return book


def _versions() -> Book:
    """Which versions are served."""
    book = Book()
    book.get("/v2/health/ready")
    book.get("/v2")
    book.get("/models")
    book.post("/v2/repository/index")
    for name in ("digits", "shift", "configured", "broken", "empty"):
        for version in ("", "/versions/1", "/versions/2", "/versions/10"):
            book.get(f"/v2/models/{name}{version}")
            book.get(f"/v2/models/{name}{version}/config")
            book.get(f"/v2/models/{name}{version}/ready")
            book.post_json(f"/v2/models/{name}{version}/infer", _SHIFT)
        book.get(f"/models/{name}/all")
    for version in ("", "1", "2", "10"):
        book.call("ModelMetadata", pb.ModelMetadataRequest(name="shift", version=version), version)
    book.post("/v2/repository/models/shift/load", b"{}")
    book.call("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="shift"))
    return book


def _commands() -> Book:
    """Commands that end by themselves: wrong calls of `serve`, and what shows a store."""
    book = Book()
    store = ("--store", f"{FOLDER}/mixed")
    for options in (
        *(("--max-queue", "0"), ("--edges", "many"), ("--no-such-option",)),
        *(("--max-body-mb", "9", "--max-inflight-mb", "8"), ("--version-policy", "newest"), ("--load-model", "a")),
        *(("--api-key-file", f"{FOLDER}/nowhere"), ("--admin-token-file", f"{FOLDER}/empty"), ("--engine", "abacus")),
        ("--store", f"{FOLDER}/nowhere"),
    ):
        book.command("serve", "--port", "0", "--grpc-port", "-1", *options)
    book.command("inspect", *store)
    book.command("inspect", "shift", *store)
    book.command("inspect", "nobody", *store)
    book.command("predict", "digits", f"{FOLDER}/nowhere.png", "--url", "http://127.0.0.1:9")
    book.command("no-such-command")
    return book
