"""Loading, unloading, rolling back and reloading, while clients keep asking and none may notice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.support.crowds import Crowd
from tests.support.servers import Server, metric, rows_request, start_server, wait_until
from tests.support.stores import StoreFolder
from tests.support.wire import Wire, check_refused, head

# Many servers are started here, and much is waited for.
pytestmark = pytest.mark.slow

POLL = ("--model-control", "poll", "--poll-interval-s", "0.05", "--access-log", "off")
EXPLICIT = ("--model-control", "explicit", "--host", "127.0.0.1", "--access-log", "off")
ROW = rows_request(0.0)
NOT_ALLOWED = "explicit model load / unload is not allowed if polling is enabled"


def ask(client: httpx.Client) -> httpx.Response:
    return client.post("/v2/models/shift/infer", json=ROW)


def assert_nobody_noticed(crowd: Crowd) -> None:
    assert {attempt.status for attempt in crowd.attempts} == {200}


@pytest.fixture
def polling(store: StoreFolder) -> Iterator[Server]:
    store.add_shift(1.0)
    with start_server(*POLL, store=store.root) as server:
        yield server


@pytest.fixture
def explicit(store: StoreFolder) -> Iterator[Server]:
    store.add_shift(1.0)
    with start_server(*EXPLICIT, store=store.root) as server:
        yield server


def test_a_new_version_takes_over_and_its_removal_rolls_back_without_a_gap(polling: Server, store: StoreFolder) -> None:
    with Crowd(polling, 4, ask) as crowd:
        assert polling.shift() == ("1", 1.0)
        for _ in range(3):
            store.add_shift(2.0, version=2)
            wait_until(lambda: polling.shift() == ("2", 2.0), "the new version answers")
            wait_until(lambda: "shift/1" not in polling.index() or polling.index()["shift/1"][1] == "unloaded",
                       "the old version is gone")  # fmt: skip
            shutil.rmtree(store.root / "shift" / "2")
            wait_until(lambda: polling.shift() == ("1", 1.0), "the version before answers again")
            wait_until(lambda: "shift/2" not in polling.index(), "the index forgets what has left the store")
        wait_until(lambda: crowd.answered > 200, "the crowd has asked for a while")
    assert_nobody_noticed(crowd)


def test_files_that_change_in_place_are_loaded_again_without_a_gap(polling: Server, store: StoreFolder) -> None:
    with Crowd(polling, 4, ask) as crowd:
        for by in (5.0, 6.0, 7.0):
            store.add_shift(by)
            wait_until(lambda by=by: polling.shift() == ("1", by), "the new files answer")  # type: ignore[misc]
        before = len(crowd.attempts)
        success = polling.statistics("shift")["inference_stats"]["success"]["count"]
        assert success > before, "counters never begin anew"
        assert_nobody_noticed(crowd)
        # Even by a model of another shape.
        other = StoreFolder(store.root.parent / "aside").add_add_sub()
        other.replace(store.root / "shift" / "1" / "model.onnx")
        wait_until(lambda: polling.get("/v2/models/shift").json()["inputs"][0]["name"] == "INPUT0", "it is another one")
        wait_until(lambda: crowd.attempts[-1].status == 400, "what does not fit any more is told so")
    assert {attempt.status for attempt in crowd.attempts} == {200, 400}, "never a 5xx"


def test_a_broken_version_is_refused_and_the_old_one_goes_on(polling: Server, store: StoreFolder) -> None:
    broken = store.root / "shift" / "2"
    with Crowd(polling, 2, ask) as crowd:
        broken.mkdir()
        (broken / "model.onnx").write_bytes(b"not a model")
        wait_until(lambda: polling.index().get("shift/2", ("",))[0] == "UNAVAILABLE", "the new version is refused")
        index = polling.index()
        assert ("model.onnx" in index["shift/2"][1], index["shift/1"]) == (True, ("READY", ""))
        assert (metric(polling, "convoy_loads_total", result="refused"), polling.is_ready()) == (1, True)
        store.add_shift(3.0, version=2)
        wait_until(lambda: polling.shift() == ("2", 3.0), "the mended version answers")
        (broken / "model.onnx").write_bytes(b"not a model either")
        wait_until(lambda: polling.index()["shift/2"][1], "the reload is refused")
        assert (polling.index()["shift/2"][0], polling.shift()) == ("READY", ("2", 3.0))
    assert_nobody_noticed(crowd)


def test_a_link_that_is_swapped_is_followed(tmp_path: Path, store: StoreFolder) -> None:
    one, two = StoreFolder(tmp_path / "one"), StoreFolder(tmp_path / "two")
    one.add_shift(1.0, version=7)
    two.add_shift(2.0, version=7)
    (store.root / "shift").symlink_to(one.root / "shift")
    with start_server(*POLL, store=store.root) as server, Crowd(server, 2, ask) as crowd:
        for folder, by in ((two, 2.0), (one, 1.0), (two, 2.0)):
            fresh = store.root / "..data"
            fresh.symlink_to(folder.root / "shift")
            fresh.replace(store.root / "shift")
            wait_until(lambda by=by: server.shift() == ("7", by), "the link's new target answers")  # type: ignore[misc]
    assert_nobody_noticed(crowd)


def test_an_empty_store_is_watched_and_everything_may_leave_it_with_its_metrics(store: StoreFolder) -> None:
    with start_server(*POLL, store=store.root) as server:
        assert server.post("/v2/repository/index").json() == []
        store.add_shift(1.0)
        store.add_digits()
        wait_until(lambda: server.shift() == ("1", 1.0), "the first model answers")
        wait_until(lambda: server.get("/v2/models/digits/ready").status_code == 200, "the bundle serves")
        assert 'convoy_engine_info{device="cpu"' in server.get("/metrics").text
        for name in ("digits", "shift"):
            shutil.rmtree(store.root / name)
            wait_until(lambda name=name: server.get(f"/v2/models/{name}/ready").status_code == 404, "it is gone")  # type: ignore[misc]
        wait_until(lambda: 'model="digits"' not in server.get("/metrics").text, "its metrics are gone")
        assert "digits/1" not in server.index()
        assert server.get("/v2/health/ready").status_code == 200


def test_explicit_loads_nothing_by_itself_and_serves_what_is_asked_for(store: StoreFolder) -> None:
    store.add_shift(1.0)
    store.add_identity()
    with start_server(*EXPLICIT, "--load-model", "identity_fp32", store=store.root) as server:
        rows = server.post("/v2/repository/index").json()
        assert [(row["name"], row.get("state")) for row in rows] == [("identity_fp32", "READY"), ("shift", None)]
        assert server.shift()[1] is None
        loaded = server.load("shift")
        assert (loaded.status_code, loaded.content, server.shift()) == (200, b"", ("1", 1.0))
        assert server.load("shift").status_code == 200
        store.add_shift(2.0, version=2)
        assert server.shift() == ("1", 1.0)
        assert (server.load("shift").status_code, server.shift()) == (200, ("2", 2.0))
        assert (server.unload("shift").status_code, server.unload("shift").status_code) == (200, 200)
        gone = server.post("/v2/models/shift/infer", json=ROW)
        check_refused(gone, 404, "Request for unknown model: 'shift' has no available versions")
        assert server.index()["shift/2"] == ("UNAVAILABLE", "unloaded")


POLICIES: tuple[dict[str, Any], ...] = (
    {"specific": {"versions": [7]}},
    {"specific": {"versions": [1, 7]}},
    {"specific": {"versions": []}},
    {"specific": {"versions": [0]}},
    {"specific": {"versions": ["01"]}},
    {"latest": {"num_versions": 0}},
    {"latest": {}, "all": {}},
    {},
)


def test_a_version_policy_that_no_version_meets_takes_nothing_away(explicit: Server, store: StoreFolder) -> None:
    store.add_shift(2.0, version=2)
    assert explicit.load("shift", version_policy={"all": {}}).status_code == 200
    with Crowd(explicit, 2, ask) as crowd, triton_grpc.InferenceServerClient(explicit.grpc_address) as client:
        for policy in POLICIES:
            answer, before = explicit.load("shift", version_policy=policy), crowd.answered
            is_missing = 7 in policy.get("specific", {}).get("versions", ())
            told = ("asks for version 7, but the store has 1, 2", "version 1, 2 serves") if is_missing else ()
            check_refused(answer, 400, *told)
            with pytest.raises(InferenceServerException, match="version"):
                client.load_model("shift", config=json.dumps({"version_policy": policy}))
            wait_until(lambda before=before: crowd.answered > before + 20, "the crowd has asked for a while")  # type: ignore[misc]
            assert explicit.get("/v2/models/shift").json()["versions"] == ["1", "2"]
            assert explicit.index()["shift/2"] == ("READY", "")
            # Nothing of it is remembered.
            assert explicit.load("shift").status_code == 200
            assert explicit.get("/v2/models/shift").json()["versions"] == ["2"]
            assert explicit.load("shift", version_policy={"all": {}}).status_code == 200
    assert_nobody_noticed(crowd)
    store.add_shift(3.0, version=3)
    assert (explicit.load("shift").status_code, explicit.shift()) == (200, ("3", 3.0))


def test_whatever_is_wrong_with_a_load_what_serves_goes_on(explicit: Server, store: StoreFolder) -> None:
    store.add_shift(2.0, version=2)
    config, broken = store.root / "shift" / "config.pbtxt", store.root / "shift" / "3" / "model.onnx"
    assert explicit.load("shift").status_code == 200

    def check(status: int, *words: str, model: str = "shift", **load: Any) -> None:
        check_refused(explicit.load(model, **load), status, *words)
        assert explicit.shift() == ("2", 2.0), words

    wrong = {
        'name: "other"': "name is 'other'",
        "max_batch_size: 4\nmaxbatch: 3": "line 2",
        'platform: "ensemble"': "ensemble",
        "version_policy { specific { versions: [ 9 ] } }": "version_policy in config.pbtxt asks for version 9",
        "version_policy { specific {} }": "version_policy",
        'default_model_filename: "other.onnx"': "other.onnx",
        "input { name: 'z' }": "'z' is not in the graph",
        "max_batch_size": "line 1",
    }
    first = {"version_policy": {"specific": {"versions": [1]}}}
    for text, words in wrong.items():
        config.write_text(text)
        check(400, words)
        if "[ 9 ]" not in text:  # which the request's own policy replaces
            check(400, words, **first)
    config.write_text("version_policy { specific { versions: [ 9 ] } }")
    assert (explicit.load("shift", **first).status_code, explicit.shift()) == (200, ("1", 1.0))
    config.unlink()
    assert explicit.load("shift").status_code == 200
    for field in ({"max_batch_size": 1 << 30}, {"max_batch_size": "x"}):
        check(400, **field)
    broken.parent.mkdir()
    broken.write_bytes(b"not a model")
    check(400, "load failed for model 'shift': version 3 is at UNAVAILABLE state: ")
    assert explicit.index()["shift/3"][0] == "UNAVAILABLE"
    check(404, "failed to load 'nobody', failed to poll from model repository", model="nobody")
    shutil.move(store.root / "shift", store.root / "moved")
    check(404, "the store has no version of it")


def test_the_configuration_says_which_versions_are_served(store: StoreFolder) -> None:
    """For bare models and bundles, before --version-policy, and anew whenever it changes."""
    for version in (1, 2, 3):
        store.add_shift(float(version), version=version)
        store.add_digits(version)

    def wants(policy: str) -> None:
        for name in ("shift", "digits"):
            aside = store.root / f"{name}.pbtxt"
            aside.write_text(f"version_policy {{ {policy} }} max_batch_size: 8")
            aside.replace(store.root / name / "config.pbtxt")

    def told(words: str) -> set[str]:
        return {place.split("/")[0] for place, (_, why) in server.index().items() if words in why}

    def served() -> list[list[str]]:
        return [server.get(f"/v2/models/{name}").json().get("versions", []) for name in ("shift", "digits")]

    wants("specific { versions: [ 1 ] }")
    with start_server(*POLL, store=store.root) as server:
        assert served() == [["1"], ["1"]]
        with Crowd(server, 2, ask) as crowd:
            wants("latest { num_versions: 2 }")
            wait_until(lambda: served() == [["2", "3"], ["2", "3"]], "the two highest serve")
            wants("all {}")
            wait_until(lambda: served() == [["1", "2", "3"]] * 2, "all serve")
            wants("specific { versions: [ 2 ] }")
            wait_until(lambda: served() == [["2"], ["2"]], "the one that is named serves")
            for broken, words in (("specific { versions: [ 9 ] }", "asks for version 9"), ("}", "line 1")):
                wants(broken)
                wait_until(lambda words=words: told(words) >= {"shift", "digits"}, "it is told")  # type: ignore[misc]
                assert served() == [["2"], ["2"]]
            wants("latest {}")
            wait_until(lambda: served() == [["3"], ["3"]], "the highest serves")
            wait_until(lambda: {why for _, why in server.index().values()} <= {"", "unloaded"}, "all is well again")
        assert_nobody_noticed(crowd)
    wants("specific { versions: [ 1, 3 ] }")
    with start_server("--version-policy", "1", store=store.root) as server:
        assert served() == [["1", "3"], ["1", "3"]]
        policy = server.get("/v2/models/shift/config").json()["version_policy"]
        assert policy == {"specific": {"versions": [1, 3]}}
        config = triton_grpc.InferenceServerClient(server.grpc_address).get_model_config("shift").config
        assert list(config.version_policy.specific.versions) == [1, 3]


def test_a_request_to_load_may_set_batch_size_and_versions_and_nothing_else(
    explicit: Server, store: StoreFolder
) -> None:
    def most() -> int:
        return int(explicit.get("/v2/models/shift/config").json()["max_batch_size"])

    assert (explicit.load("shift", max_batch_size="16").status_code, most()) == (200, 16)
    assert (explicit.load("shift").status_code, most()) == (200, 32)
    store.add_shift(2.0, version=2)
    assert explicit.load("shift", version_policy={"specific": {"versions": [1, "2"]}}).status_code == 200
    assert explicit.get("/v2/models/shift").json()["versions"] == ["1", "2"]
    fields: tuple[tuple[dict[str, Any], int], ...] = (
        ({"max_batch_size": -1}, 400),
        ({"version_policy": {"newest": 3}}, 400),
        ({"version_policy": {"latest": {"num_versions": 2}}}, 200),
        ({"name": "other"}, 400),
        ({"platform": "tensorflow_savedmodel"}, 400),
        ({"backend": ["python"]}, 400),
        ({"name": "shift", "platform": "onnxruntime_onnx", "backend": "onnxruntime"}, 200),
        ({"instance_group": []}, 501),
        ({"max_batch_size": 0}, 200),
    )
    assert [explicit.load("shift", **given).status_code for given, _ in fields] == [status for _, status in fields]
    for parameters, status in (({"config": "{"}, 400), ({"config": 3}, 400), ({"file:1/model.onnx": "eA=="}, 501)):
        check_refused(explicit.post("/v2/repository/models/shift/load", json={"parameters": parameters}), status)
    assert explicit.post("/v2/repository/models/shift/load", content=b"[]").status_code == 400
    assert explicit.post("/v2/repository/other/models/shift/load").status_code == 501
    assert explicit.shift()[0] == "2"


def test_triton_clients_load_and_unload_over_both_wires(explicit: Server) -> None:
    with (
        triton_http.InferenceServerClient(f"127.0.0.1:{explicit.port}") as http,
        triton_grpc.InferenceServerClient(explicit.grpc_address) as grpc,
    ):
        for client in (http, grpc):
            client.load_model("shift", config=json.dumps({"max_batch_size": 4}))
            assert client.is_model_ready("shift")
            client.unload_model("shift", unload_dependents=True)
            assert not http.is_model_ready("shift")
            with pytest.raises(InferenceServerException, match="failed to poll from model repository"):
                client.load_model("nobody")
        with pytest.raises(InferenceServerException, match="not supported") as refused:
            grpc.load_model("shift", config="{}", files={"file:1/model.onnx": b"x"})
    assert refused.value.status() == "StatusCode.UNIMPLEMENTED"


def test_loading_unloading_and_asking_at_once_breaks_nothing(explicit: Server, store: StoreFolder) -> None:
    store.add_identity()
    assert explicit.load("identity_fp32").status_code == 200

    def steady(client: httpx.Client) -> httpx.Response:
        return client.post("/v2/models/identity_fp32/infer", json=ROW)

    def change(number: int) -> int:
        return (explicit.load, explicit.unload)[number % 2]("shift").status_code

    with Crowd(explicit, 2, ask) as crowd, Crowd(explicit, 2, steady) as undisturbed, ThreadPoolExecutor(4) as pool:
        assert set(pool.map(change, range(40))) == {200}
    # 404 while it is unloaded, 503 while it is loaded anew; nothing that was taken fails.
    assert {attempt.status for attempt in crowd.attempts} <= {200, 404, 503}
    assert_nobody_noticed(undisturbed)
    wait_until(explicit.is_at_rest, "nothing is held")


def test_reloading_under_load_loses_no_request(explicit: Server, store: StoreFolder) -> None:
    assert explicit.load("shift").status_code == 200
    with Crowd(explicit, 4, ask) as crowd:
        for number in range(10):
            store.add_shift(float(number))
            assert (explicit.load("shift").status_code, explicit.shift()) == (200, ("1", float(number)))
    assert_nobody_noticed(crowd)
    # The last of them once the last request to it has been answered.
    wait_until(
        lambda: explicit.log_so_far.count("unloaded shift version 1") == 9 + 1, "all that were replaced are gone"
    )


def test_only_the_admin_token_loads_models_where_others_can_ask(store: StoreFolder, tmp_path: Path) -> None:
    store.add_shift(1.0)
    token, key = tmp_path / "token", tmp_path / "key"
    token.write_text("boss\n")
    key.write_text("guest\n")
    mode = ("--model-control", "explicit", "--host", "0.0.0.0")
    path = "/v2/repository/models/shift/load"
    with start_server(*mode, store=store.root) as server:
        check_refused(server.post(path), 401, "--admin-token-file")
    options = (*mode, "--admin-token-file", str(token), "--api-key-file", str(key))
    with start_server(*options, store=store.root) as server:
        bearer = {word: {"authorization": f"Bearer {word}"} for word in ("nobody", "guest", "boss")}
        assert [server.post(path, headers=bearer[word]).status_code for word in bearer] == [401, 401, 200]
        # The token opens nothing but this door.
        assert [server.get("/v2", headers=bearer[word]).status_code for word in bearer] == [401, 200, 401]
        with triton_grpc.InferenceServerClient(server.grpc_address) as client:
            with pytest.raises(InferenceServerException) as refused:
                client.unload_model("shift", headers=bearer["guest"])
            assert refused.value.status() == "StatusCode.UNAUTHENTICATED"
            client.unload_model("shift", headers=bearer["boss"])


def test_the_other_modes_refuse_to_load_in_tritons_words(polling: Server) -> None:
    for answer in (polling.load("shift"), polling.unload("shift")):
        check_refused(answer, 501, NOT_ALLOWED)
    with triton_grpc.InferenceServerClient(polling.grpc_address) as client:
        with pytest.raises(InferenceServerException, match=NOT_ALLOWED) as refused:
            client.load_model("shift")
        assert refused.value.status() == "StatusCode.UNIMPLEMENTED"


def test_a_slow_upload_to_a_version_that_is_being_unloaded_is_still_answered(explicit: Server) -> None:
    assert explicit.load("shift").status_code == 200
    body = json.dumps(ROW).encode()
    with Wire(explicit.port) as wire, ThreadPoolExecutor(1) as pool:
        wire.send(head("/v2/models/shift/infer", {"Content-Length": str(len(body))}) + body[:10])
        wait_until(lambda: explicit.stats()["inflight_bytes"] > 0, "the upload has begun")
        unloading = pool.submit(explicit.unload, "shift")
        wait_until(lambda: explicit.index()["shift/1"][0] == "UNLOADING", "the unloading has begun")
        assert explicit.post("/v2/models/shift/infer", json=ROW).status_code == 404
        wire.send(body[10:])
        reply = wire.reply()
        assert (reply.status, set(reply.json()["outputs"][0]["data"])) == (200, {1.0})
        assert unloading.result().status_code == 200
    assert explicit.index()["shift/1"] == ("UNAVAILABLE", "unloaded")
