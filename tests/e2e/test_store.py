"""From a store to what is served: bundles and bare models, whole and broken."""

from __future__ import annotations

import re
import shutil
import socket
from pathlib import Path

import pytest

from convoy.models.bundle import MANIFEST
from tests.support.servers import Server, run_convoy, start_server, wait_until
from tests.support.stores import DEMO, StoreFolder, digit, make_int8_right_everywhere


def flip_a_byte(path: Path, position: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def served(server: Server) -> set[str]:
    return {f"{model['name']}/{model['version']}" for model in server.stats()["models"]}


def refused(server: Server) -> dict[str, str]:
    return {f"{one['name']}/{one['version']}": one["reason"] for one in server.stats()["refused"]}


@pytest.mark.slow
def test_one_wrong_byte_and_the_version_before_keeps_serving(store: StoreFolder) -> None:
    """For every file of a bundle there is a model whose second version has it with one byte wrong."""
    files = {f"model-{number}": path.name for number, path in enumerate(DEMO.iterdir())}
    for model, name in files.items():
        store.add_digits(1, model)
        flip_a_byte(store.add_digits(2, model) / name)
    with start_server(store=store.root) as server:
        assert served(server) == {f"{model}/1" for model in files}
        index = {(row["name"], row["version"]): row["state"] for row in server.post("/v2/repository/index").json()}
        for model, name in files.items():
            assert name in refused(server)[f"{model}/2"]
            (line,) = [line for line in server.log.splitlines() if f"refused {model} version 2" in line]
            assert name in line
            answer = server.post(f"/predictions/{model}", content=digit("seven")).json()
            assert (answer["version"], answer["predictions"][0]["label"]) == ("1", "7")
            assert server.post(f"/predictions/{model}/2", content=digit("seven")).status_code == 404
            assert (index[model, "1"], index[model, "2"]) == ("READY", "UNAVAILABLE")
    inspected = run_convoy("inspect", "--store", str(store.root))
    assert inspected.returncode == 1
    for name in files.values():
        assert any("broken" in line and name in line for line in inspected.stdout.splitlines()), inspected.stdout
    assert f"{len(files)} of {2 * len(files)} versions are broken" in inspected.stdout


def test_what_is_broken_does_not_stop_what_is_sound(store: StoreFolder) -> None:
    store.add_digits(1)
    store.add_add_sub()
    (store.root / "half" / "1").mkdir(parents=True)
    shutil.copy(DEMO / "fp32.onnx", store.root / "half" / "1")
    shutil.copytree(DEMO, store.root / "cut" / "1", ignore=shutil.ignore_patterns("canary.safetensors"))
    (store.root / "empty" / "1").mkdir(parents=True)
    (store.root / "junk" / "1").mkdir(parents=True)
    (store.root / "junk" / "1" / "model.onnx").write_bytes(b"not an onnx file")
    (store.root / "nojson" / "1").mkdir(parents=True)
    (store.root / "nojson" / "1" / MANIFEST).write_text("{")
    # Every file of it is sound, but for its seal.
    manifest = store.add_digits(1, "resealed") / MANIFEST
    manifest.write_text(manifest.read_text().replace('"serve": true', '"serve": false', 1))
    (store.root / "digits" / ".writing-x").mkdir()
    (store.root / "digits" / "02").mkdir()
    (store.root / "digits" / "latest").mkdir()
    (store.root / "a file").write_text("")
    with start_server(store=store.root) as server:
        assert served(server) == {"digits/1", "simple/1"}
        assert set(refused(server)) == {"half/1", "cut/1", "empty/1", "junk/1", "nojson/1", "resealed/1"}
        assert "canary.safetensors" in refused(server)["cut/1"]
        assert "was changed" in refused(server)["resealed/1"]
        assert "is no model, there is nothing in it" in refused(server)["empty/1"]
        assert "is no model, there is only fp32.onnx; put a bundle" in refused(server)["half/1"]
        for reason in refused(server).values():
            assert "\n" not in reason
        assert server.is_ready()
        answer = server.post("/predictions/cut", content=digit("one"))
        assert answer.status_code == 404
        assert "has no available versions" in answer.json()["error"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("latest", {"digits/3", "simple/2"}),
        ("all", {"digits/1", "digits/2", "digits/3", "simple/1", "simple/2"}),
        ("1,2", {"digits/1", "digits/2", "simple/1", "simple/2"}),
        ("3", {"digits/3"}),
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
        assert "there is no model in" in server.log
        assert "convoy export" in server.log


@pytest.mark.slow
def test_an_empty_store_ends_with_1(store: StoreFolder) -> None:
    with start_server(store=store.root, exit_code=1, wait_ready=False) as server:
        server.wait()
        assert "there is no model in" in server.log


def test_a_store_that_is_not_there_is_one_line_and_2() -> None:
    ended = run_convoy("serve", "--store", "/nowhere/at/all", "--port", "0")
    assert ended.returncode == 2
    assert "there is no store at /nowhere/at/all" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_a_port_in_use_is_one_line_and_2() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run_convoy("serve", "--port", str(port))
    assert ended.returncode == 2
    assert f":{port}" in ended.stderr
    assert "--port" in ended.stderr
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
        (["--max-inflight-mb", "1", "--max-body-mb", "2"], "max"),
        (["--engine", "steam"], "--engine"),
        (["--api-key-file", "/nowhere"], "--api-key-file"),
        (["--access-log", "some"], "--access-log"),
        (["--threads", "-1"], "--threads"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
    ],
)
def test_a_wrong_option_is_said_and_2(options: list[str], word: str) -> None:
    ended = run_convoy("serve", "--port", "0", *options) if "--port" not in options else run_convoy("serve", *options)
    assert ended.returncode == 2, ended.stderr
    assert word in ended.stderr
    assert "Traceback" not in ended.stderr


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
def test_a_model_that_cannot_be_read_is_refused_and_the_others_served(store: StoreFolder) -> None:
    store.add_digits()
    path = store.add_add_sub()
    path.unlink()
    path.symlink_to("/nowhere/model.onnx")
    with start_server(store=store.root) as server:
        assert served(server) == {"digits/1"}
        assert "simple/1" in refused(server)


def test_the_demo_is_served_when_no_store_is_named() -> None:
    with start_server() as server:
        assert served(server) == {"digits/1"}


@pytest.mark.slow
def test_inspect_shows_a_sound_store_and_a_single_model(store: StoreFolder) -> None:
    store.add_digits()
    store.add_add_sub()
    store.add_mean()
    shown = run_convoy("inspect", "--store", str(store.root))
    assert shown.returncode == 0, shown.stdout
    for word in ("digits", "fp32.onnx", "int8-cpu.onnx", "simple", "batched up to 32", "mean", "not batched"):
        assert word in shown.stdout
    one = run_convoy("inspect", "digits", "--store", str(store.root))
    assert one.returncode == 0
    assert "sha256" in one.stdout
    assert "batched up to 32" not in one.stdout
    nobody = run_convoy("inspect", "nobody", "--store", str(store.root))
    assert nobody.returncode == 2
    assert "'nobody'" in nobody.stderr


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
        assert config["max_batch_size"] == 4
        assert config["output"][0]["label_filename"] == "labels.txt"
        batching = config["dynamic_batching"]
        assert (batching["priority_levels"], batching["default_priority_level"]) == (5, 4)
        row = {"shape": [5, 16], "datatype": "INT32", "data": [0] * 80}
        body = {"inputs": [{"name": "INPUT0", **row}, {"name": "INPUT1", **row}]}
        answer = server.post("/v2/models/simple/infer", json=body)
        assert "batch-size must be <= 4" in answer.json()["error"]
        assert "max_batch_size is 4 in config.pbtxt" in server.log


def test_the_fields_of_a_configuration_that_decide_what_answers_are_honoured(store: StoreFolder) -> None:
    """The file that is named, each output's own labels, and a version's checksum, over both wires."""
    weights = store.add_shift(7.0)
    weights.rename(weights.with_name("weights.onnx"))
    store.add_shift(1.0)
    config = store.root / "shift" / "config.pbtxt"
    config.write_text('name: "shift" max_batch_size: 4 default_model_filename: "weights.onnx"')
    shutil.copytree(store.root / "shift", store.root / "sealed")
    seal = f'name: "checksum" parameters {{ key: "MD5:1/model.onnx" value: "{"0" * 32}" }}'
    (store.root / "sealed" / "config.pbtxt").write_text(f"model_repository_agents {{ agents {{ {seal} }} }}")
    store.add_add_sub()
    labelled = CONFIG.format(labels="").replace('"OUTPUT1"', '"OUTPUT1" label_filename: "names.txt"')
    (store.root / "simple" / "config.pbtxt").write_text(labelled)
    (store.root / "simple" / "names.txt").write_text("".join(f"class {number}\n" for number in range(16)))
    (store.root / "chain" / "1").mkdir(parents=True)
    (store.root / "chain" / "config.pbtxt").write_text('platform: "ensemble" ensemble_scheduling { step {} }')
    (store.root / "code" / "1").mkdir(parents=True)
    (store.root / "code" / "1" / "model.py").write_text("")
    (store.root / "code" / "config.pbtxt").write_text('backend: "python"')
    with start_server(store=store.root) as server:
        assert served(server) == {"shift/1", "simple/1"}
        reasons = refused(server)
        assert "ONNX alone" in reasons["chain/1"]
        assert "runs no code of a model" in reasons["code/1"]
        assert "manifest" not in reasons["chain/1"] + reasons["code/1"]
        assert "its MD5 is" in reasons["sealed/1"]
        row = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [0, 0, 0, 0]}]}
        assert server.post("/v2/models/shift/infer", json=row).json()["outputs"][0]["data"] == [7.0] * 4
        files = [one["label_filename"] for one in server.get("/v2/models/simple/config").json()["output"]]
        assert [bool(file) for file in files] == [False, True]
        wanted = [{"name": f"OUTPUT{number}", "parameters": {"classification": 1}} for number in range(2)]
        tensors = [
            {"name": f"INPUT{number}", "shape": [1, 16], "datatype": "INT32", "data": list(range(16))}
            for number in range(2)
        ]
        answer = server.post("/v2/models/simple/infer", json={"inputs": tensors, "outputs": wanted}).json()
        assert [output["data"] for output in answer["outputs"]] == [["30:15"], ["0:0:class 0"]]


@pytest.mark.slow
def test_a_configuration_that_does_not_fit_is_refused_with_a_reason(store: StoreFolder) -> None:
    refusals = {
        "unreadable": ("max_batch_size: many", "cannot be read"),
        "unlabelled": (CONFIG.format(labels='label_filename: "nowhere.txt"'), "nowhere.txt"),
        "longer": (CONFIG.format(labels="").replace("dims: [ 16 ]", "dims: [ 17 ]", 1), "INPUT0"),
        "unbatched": (CONFIG.format(labels="").replace("max_batch_size: 4", ""), "make them agree"),
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


def test_whether_a_bare_model_has_a_batch_is_found_out_by_running_it(store: StoreFolder) -> None:
    store.add_add_sub()
    store.add_mean()
    store.add_identity("FP32", (4, 4), name="fixed")
    with start_server(store=store.root) as server:
        sizes = {
            name: server.get(f"/v2/models/{name}/config").json()["max_batch_size"]
            for name in ("simple", "mean", "fixed")
        }
        assert sizes == {"simple": 32, "mean": 0, "fixed": 0}
        assert "differs from the row run alone" in server.log
        assert "not every input and output has a dynamic first dimension" in server.log
        for samples in (1, 3, 50):
            rows = [[float(row)] * 4 for row in range(samples)]
            tensor = {"name": "x", "shape": [samples, 4], "datatype": "FP32", "data": rows}
            answer = server.post("/v2/models/mean/infer", json={"inputs": [tensor]}).json()
            assert answer["outputs"][0]["shape"] == [samples, 4]
            assert answer["outputs"][0]["data"][0] == pytest.approx(-(samples - 1) / 2)


@pytest.mark.slow
def test_the_operator_may_lower_the_batch(store: StoreFolder) -> None:
    store.add_digits()
    store.add_add_sub()
    store.add_mean()
    with start_server("--max-batch", "2", store=store.root) as server:
        sizes = {model["name"]: model["max_batch_size"] for model in server.stats()["models"]}
        assert sizes == {"digits": 2, "simple": 2, "mean": 0}
        assert server.post("/predictions/digits", content=digit("six")).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_precision_may_be_asked_for_by_name(store: StoreFolder, precision: str) -> None:
    make_int8_right_everywhere(store.add_digits())
    with start_server("--precision", precision, store=store.root) as server:
        assert server.stats()["models"][0]["precision"] == precision
        assert server.post("/predictions/digits", content=digit("eight")).json()["predictions"][0]["label"] == "8"


def test_options_come_from_the_environment_too_and_the_command_line_wins(store: StoreFolder) -> None:
    store.add_digits()
    env = {"CONVOY_STORE": str(store.root), "CONVOY_SERVER_NAME": "from-environment", "CONVOY_MAX_BATCH": "3"}
    with start_server("--max-batch", "5", env=env) as server:
        assert server.get("/v2").json()["name"] == "from-environment"
        assert server.stats()["models"][0]["max_batch_size"] == 5


def test_what_lies_in_the_store_and_is_no_model_is_told_once_however_often_it_is_looked_at(store: StoreFolder) -> None:
    """As it was, and as it came while the store is watched; each with where it would be right."""
    store.add_add_sub()
    store.add_add_sub(name="my model")
    store.add_add_sub(name="n" * 129)
    for name in ("v1", "01"):
        (store.root / name).mkdir()
        store.add_shift(0.0, name="moved").replace(store.root / name / "model.onnx")
    shutil.rmtree(store.root / "moved")
    options = ("--model-control", "poll", "--poll-interval-s", "0.05")
    with start_server(*options, store=store.root) as server:
        store.add_add_sub(name="second").parent.rename(store.root / "second" / "v2")
        wait_until(lambda: "second/v2 is not served" in server.log_so_far, "what came is told")
        for name in ("third", "fourth"):  # each takes two looks or more
            store.add_add_sub(name=name)
            wait_until(lambda name=name: f"{name}/1" in served(server), "the store is looked at")  # type: ignore[misc]
        assert served(server) == {"simple/1", "third/1", "fourth/1"}
        told = [line for line in server.log.splitlines() if " is not served: " in line]
    for place, right in (
        ("my model", "such as my-model"),
        ("n" * 100, "up to 128 letters"),
        ("v1", "move it to .*/v1/1/model.onnx"),
        ("01", "move it to .*/01/1/model.onnx"),
        ("second/v2", "rename it to 2"),
    ):
        (line,) = [line for line in told if f"{store.root}/{place}" in line]
        assert "WARNING" in line
        assert re.search(right, line), line
    assert len(told) == 5
    inspected = run_convoy("inspect", "--store", str(store.root))
    assert inspected.returncode == 0
    assert sum("misplaced" in line for line in inspected.stdout.splitlines()) == 5


def test_a_load_that_is_asked_for_says_why_there_is_no_version(store: StoreFolder) -> None:
    store.add_add_sub()
    (store.root / "net").mkdir()
    store.add_add_sub(name="moved").replace(store.root / "net" / "model.onnx")
    shutil.rmtree(store.root / "moved")
    options = ("--model-control", "explicit", "--load-model", "simple", "--host", "127.0.0.1")
    with start_server(*options, store=store.root) as server:
        answer = server.post("/v2/repository/models/net/load", json={})
        assert answer.status_code == 404
        assert f"move it to {store.root}/net/1/model.onnx" in answer.json()["error"]
