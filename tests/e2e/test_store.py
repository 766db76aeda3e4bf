"""From a store to what is served: bundles and bare models, whole and broken."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from convoy.models.bundle import MANIFEST
from tests.support.servers import Server, check_ended, run_convoy, start_server
from tests.support.stores import DEMO, StoreFolder, digit, make_int8_right_everywhere
from tests.support.wire import check_refused

ZEROS = {"name": "images", "datatype": "UINT8", "shape": [1, 32, 32, 3], "data": [0] * 3072}


def flip_a_byte(path: Path, position: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def served(server: Server) -> set[str]:
    return {f"{model['name']}/{model['version']}" for model in server.stats()["models"]}


def refused(server: Server) -> dict[str, str]:
    return {f"{one['name']}/{one['version']}": one["reason"] for one in server.stats()["refused"]}


def test_what_is_broken_does_not_stop_what_is_sound(store: StoreFolder) -> None:
    store.add_digits(1)
    flip_a_byte(store.add_digits(2) / "labels.txt")
    store.add_add_sub()
    (store.root / "half" / "1").mkdir(parents=True)
    shutil.copy(DEMO / "fp32.onnx", store.root / "half" / "1")
    shutil.copytree(DEMO, store.root / "cut" / "1", ignore=shutil.ignore_patterns("canary.safetensors"))
    for name in ("empty", "junk", "nojson", "dangling"):
        (store.root / name / "1").mkdir(parents=True)
    (store.root / "junk" / "1" / "model.onnx").write_bytes(b"not an onnx file")
    (store.root / "nojson" / "1" / MANIFEST).write_text("{")
    (store.root / "dangling" / "1" / "model.onnx").symlink_to("/nowhere/model.onnx")
    # Every file of it is sound, but for its seal.
    manifest = store.add_digits(1, "resealed") / MANIFEST
    manifest.write_text(manifest.read_text().replace('"serve": true', '"serve": false', 1))
    for nobodys in (".writing-x", "02", "latest"):
        (store.root / "digits" / nobodys).mkdir()
    (store.root / "a file").write_text("")
    told = {
        "digits/2": "labels.txt",
        "half/1": "not a model, it only has fp32.onnx; put a bundle",
        "cut/1": "canary.safetensors",
        "empty/1": "not a model, it is empty",
        "junk/1": "model.onnx",
        "nojson/1": MANIFEST,
        "dangling/1": "No such file",
        "resealed/1": "was modified",
    }
    with start_server(store=store.root) as server:
        assert served(server) == {"digits/1", "simple/1"}
        assert refused(server).keys() == told.keys()
        assert server.seven() == ("1", "7"), "the version before keeps serving"
        assert server.post("/predictions/digits/2", content=digit("seven")).status_code == 404
        assert server.index()["digits/2"][0] == "UNAVAILABLE"
        for place, words in told.items():
            assert words in refused(server)[place]
            assert "\n" not in refused(server)[place]
        assert server.is_ready()
        check_refused(server.post("/predictions/cut", content=digit("one")), 404, "has no available versions")
        check_versions_are_strings(server)


def check_versions_are_strings(server: Server) -> None:
    """In every JSON answer that names one."""
    documents = [
        server.get(path).json()
        for path in (
            *("/stats", "/store", "/models/digits", "/models/digits/all", "/v2"),
            *("/v2/models/digits", "/v2/models/digits/stats", "/v2/models/stats"),
        )
    ]
    documents += [
        server.post("/v2/repository/index").json(),
        server.post("/predictions/digits", content=digit("one")).json(),
        server.post("/predictions/digits", files=[("a", digit("one")), ("b", digit("two"))]).json(),
        server.post("/v2/models/digits/infer", json={"inputs": [ZEROS]}).json(),
    ]
    for document in documents:
        found = [*versions_in(document)]
        assert found, document
        assert all(isinstance(one, str) for one in found), document


def versions_in(document: object) -> Iterator[object]:
    if isinstance(document, list):
        for one in document:
            yield from versions_in(one)
    if isinstance(document, dict):
        for name, value in document.items():
            if name in ("version", "model_version", "modelVersion"):
                yield value
            elif name == "versions":
                yield from value
            else:
                yield from versions_in(value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("all", {"digits/1", "digits/2", "digits/3", "simple/1", "simple/2"}),
        ("1,3", {"digits/1", "digits/3", "simple/1"}),
    ],
)
def test_the_version_policy_says_what_is_loaded(store: StoreFolder, policy: str, expected: set[str]) -> None:
    for version in (1, 2, 3):
        store.add_digits(version)
    for version in (1, 2):
        store.add_add_sub(version)
    with start_server("--version-policy", policy, store=store.root) as server:
        assert served(server) == expected
        newest = max(name for name in expected if name.startswith("digits"))
        answer = server.post("/predictions/digits", content=digit("two")).json()
        assert f"digits/{answer['version']}" == newest
        metadata = server.get("/v2/models/digits").json()
        assert metadata["versions"] == sorted(name[-1] for name in expected if name.startswith("digits"))


def test_what_is_still_to_be_loaded_is_not_unknown(store: StoreFolder) -> None:
    """Whoever asks a server that is starting is told to come again, not that there is no such model."""
    names = [f"digits{number}" for number in range(8)]
    for name in names:
        store.add_digits(name=name)
    with start_server(store=store.root, wait_ready=False) as server, server.client() as client:
        statuses = []
        while not statuses or statuses[-1] != 200:
            answer = client.post(f"/predictions/{names[-1]}", content=digit("two"))
            statuses.append(answer.status_code)
            assert answer.status_code in (200, 503), answer.text
            assert answer.status_code == 200 or answer.headers["retry-after"] == "1"
        assert statuses[0] == 503, "the test came too late"
        assert client.post("/predictions/nothing", content=digit("two")).status_code in (404, 503)
        server.await_ready()
        assert client.post("/predictions/nothing", content=digit("two")).status_code == 404


def test_a_store_without_anything_to_serve_ends_with_1(store: StoreFolder) -> None:
    flip_a_byte(store.add_digits() / "fp32.onnx")
    with start_server(store=store.root, exit_code=1, wait_ready=False) as server:
        server.wait()
        assert "no model in" in server.log
        assert "convoy export" in server.log


def test_a_port_in_use_is_one_line_and_2() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run_convoy("serve", "--port", str(port))
    check_ended(ended, 2, f":{port}", "--port")
    assert len(ended.stderr.strip().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--colour", "red"], "--colour"),
        (["--port", "http"], "--port"),
        (["--port", "70000"], "--port"),
        (["--max-queue", "0"], "--max-queue"),
        (["--version-policy", "newest"], "version"),
        (["--load-model", "digits"], "model_control explicit"),
        (["--max-inflight-mb", "1", "--max-body-mb", "2"], "max"),
        (["--engine", "steam"], "--engine"),
        (["--api-key-file", "/nowhere"], "--api-key-file"),
        (["--access-log", "some"], "--access-log"),
        (["--threads", "-1"], "--threads"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
    ],
)
def test_a_wrong_option_is_said_and_2(options: list[str], word: str) -> None:
    port = [] if "--port" in options else ["--port", "0"]
    check_ended(run_convoy("serve", *port, *options), 2, word)


@pytest.mark.slow
def test_a_read_only_store_is_served(store: StoreFolder) -> None:
    store.add_digits()
    store.add_add_sub()
    paths = [store.root, *store.root.rglob("*")]
    before = {path: path.stat().st_mtime_ns for path in paths}
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        with start_server(store=store.root) as server:
            assert served(server) == {"digits/1", "simple/1"}
            assert server.post("/predictions/digits", content=digit("nine")).status_code == 200
    finally:
        for path in paths:
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert {path: path.stat().st_mtime_ns for path in [store.root, *store.root.rglob("*")]} == before


@pytest.mark.slow
def test_inspect_shows_a_sound_store_and_a_single_model(store: StoreFolder) -> None:
    store.add_digits()
    store.add_add_sub()
    store.add_mean()
    words = ("digits", "fp32.onnx", "int8-cpu.onnx", "simple", "batched up to 32", "mean", "not batched")
    check_ended(run_convoy("inspect", "--store", str(store.root)), 0, *words)
    one = run_convoy("inspect", "digits", "--store", str(store.root))
    check_ended(one, 0, "bytes")
    assert "batched up to 32" not in one.stdout
    check_ended(run_convoy("inspect", "nobody", "--store", str(store.root)), 2, "'nobody'")


# Bare models


CONFIG = """
name: "simple"
platform: "onnxruntime_onnx"
max_batch_size: 4
input [
  {{ name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] }},
  {{ name: "INPUT1" data_type: TYPE_INT32 dims: [ 16 ] }}
]
output [
  {{ name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] {labels} }},
  {{ name: "OUTPUT1" data_type: TYPE_INT32 dims: [ 16 ] }}
]
"""


LEVELS = "dynamic_batching { priority_levels: 5 default_priority_level: 4 }"


def test_a_bare_model_is_what_its_configuration_says(store: StoreFolder) -> None:
    store.add_add_sub()
    (store.root / "simple" / "config.pbtxt").write_text(CONFIG.format(labels='label_filename: "labels.txt"') + LEVELS)
    (store.root / "simple" / "labels.txt").write_text("".join(f"class {number}\n" for number in range(16)))
    with start_server(store=store.root) as server:
        config = server.get("/v2/models/simple/config").json()
        assert (config["max_batch_size"], config["output"][0]["label_filename"]) == (4, "labels.txt")
        batching = config["dynamic_batching"]
        assert (batching["priority_levels"], batching["default_priority_level"]) == (5, 4)
        row = {"shape": [5, 16], "datatype": "INT32", "data": [0] * 80}
        body = {"inputs": [{"name": "INPUT0", **row}, {"name": "INPUT1", **row}]}
        check_refused(server.post("/v2/models/simple/infer", json=body), 400, "batch-size must be <= 4")
        assert "max_batch_size is 4 in config.pbtxt" in server.log


@pytest.mark.slow
def test_a_configuration_that_does_not_fit_is_refused_with_a_reason(store: StoreFolder) -> None:
    refusals = {
        "unreadable": ("max_batch_size: many", "cannot be read"),
        "unlabelled": (CONFIG.format(labels='label_filename: "nowhere.txt"'), "nowhere.txt"),
        "longer": (CONFIG.format(labels="").replace("dims: [ 16 ]", "dims: [ 17 ]", 1), "INPUT0"),
        "unbatched": (CONFIG.format(labels="").replace("max_batch_size: 4", ""), "make them equal"),
        "reshaped": (CONFIG.format(labels="reshape: { shape: [ 4, 4 ] }"), "reshape"),
        "nameless": (CONFIG.format(labels="") + LEVELS.replace("4", "6"), "from 1 to the number of levels, 5; got 6"),
    }
    store.add_digits()
    for name, (config, _) in refusals.items():
        store.add_add_sub(name=name)
        (store.root / name / "config.pbtxt").write_text(config.replace('"simple"', f'"{name}"'))
    with start_server(store=store.root) as server:
        assert served(server) == {"digits/1"}
        for name, (_, words) in refusals.items():
            assert words in refused(server)[f"{name}/1"]


def test_options_come_from_the_environment_too_and_the_command_line_wins(store: StoreFolder) -> None:
    make_int8_right_everywhere(store.add_digits())
    env = {"CONVOY_STORE": str(store.root), "CONVOY_SERVER_NAME": "from-environment", "CONVOY_MAX_BATCH": "3"}
    with start_server("--max-batch", "5", "--precision", "int8", env=env) as server:
        assert server.get("/v2").json()["name"] == "from-environment"
        (model,) = server.stats()["models"]
        assert (model["max_batch_size"], model["precision"]) == (5, "int8")
        assert server.seven() == ("1", "7")


def test_a_load_that_is_asked_for_says_why_there_is_no_version(store: StoreFolder) -> None:
    store.add_add_sub()
    (store.root / "net").mkdir()
    store.add_add_sub(name="moved").replace(store.root / "net" / "model.onnx")
    shutil.rmtree(store.root / "moved")
    options = ("--model-control", "explicit", "--load-model", "simple", "--host", "127.0.0.1")
    with start_server(*options, store=store.root) as server:
        check_refused(
            server.post("/v2/repository/models/net/load", json={}), 404, f"move it to {store.root}/net/1/model.onnx"
        )
