"""Loading, unloading, rolling back and reloading, while clients keep asking and none may notice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.support.crowds import Crowd
from tests.support.servers import Server, check_ended, metric, rows_request, run_convoy, start_server, wait_until
from tests.support.stores import StoreFolder
from tests.support.wire import check_refused

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
    assert_nobody_noticed(crowd)
    (statistics,) = polling.get("/v2/models/shift/stats").json()["model_stats"]
    assert statistics["inference_stats"]["success"]["count"] > len(crowd.attempts), "counters never begin anew"


def test_a_model_of_another_shape_may_take_a_versions_place(polling: Server, store: StoreFolder) -> None:
    with Crowd(polling, 2, ask) as crowd:
        shutil.copyfile(store.add_add_sub(), store.root / "shift" / "1" / "next")
        (store.root / "shift" / "1" / "next").replace(store.root / "shift" / "1" / "model.onnx")
        wait_until(
            lambda: polling.get("/v2/models/shift").json()["inputs"][0]["name"] == "INPUT0", "the other model is there"
        )
        wait_until(lambda: crowd.attempts[-1].status == 400, "what does not fit any more is told so")
    assert {attempt.status for attempt in crowd.attempts} == {200, 400}, "never a 5xx"


def test_a_broken_version_is_refused_and_the_old_one_goes_on(polling: Server, store: StoreFolder) -> None:
    broken = store.root / "shift" / "2"
    with Crowd(polling, 2, ask) as crowd:
        broken.mkdir()
        (broken / "model.onnx").write_bytes(b"not a model")
        wait_until(lambda: polling.index().get("shift/2"), "the new version is judged")
        wait_until(lambda: polling.index()["shift/2"][0] == "UNAVAILABLE", "the new version is refused")
        reason = polling.index()["shift/2"][1]
        assert "model.onnx" in reason
        assert metric(polling, "convoy_loads_total", result="refused") == 1
        assert polling.index()["shift/1"] == ("READY", "")
        assert polling.get("/v2/health/ready").status_code == 200
        store.add_shift(3.0, version=2)
        wait_until(lambda: polling.shift() == ("2", 3.0), "the mended version answers")
        (broken / "model.onnx").write_bytes(b"not a model either")
        wait_until(lambda: polling.index()["shift/2"][1], "the reload is refused")
        assert polling.index()["shift/2"][0] == "READY"
        assert polling.shift() == ("2", 3.0)
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


def test_explicit_loads_nothing_by_itself_and_serves_what_is_asked_for(explicit: Server, store: StoreFolder) -> None:
    store.add_identity()
    assert explicit.post("/v2/repository/index").json() == [{"name": "identity_fp32"}, {"name": "shift"}]
    assert explicit.shift()[1] is None
    loaded = explicit.load("shift")
    assert (loaded.status_code, loaded.content) == (200, b"")
    assert explicit.shift() == ("1", 1.0)
    assert explicit.load("shift").status_code == 200
    store.add_shift(2.0, version=2)
    assert explicit.shift() == ("1", 1.0)
    assert explicit.load("shift").status_code == 200
    assert explicit.shift() == ("2", 2.0)
    assert (explicit.unload("shift").status_code, explicit.unload("shift").status_code) == (200, 200)
    gone = explicit.post("/v2/models/shift/infer", json=ROW)
    assert gone.status_code == 404
    assert gone.json()["error"].startswith("Request for unknown model: 'shift' has no available versions")
    assert explicit.index()["shift/2"] == ("UNAVAILABLE", "unloaded")


def test_named_models_are_loaded_at_the_start(store: StoreFolder) -> None:
    store.add_shift(1.0)
    store.add_identity()
    with start_server(*EXPLICIT, "--load-model", "shift", store=store.root) as server:
        assert [one["name"] for one in server.stats()["models"]] == ["shift"]
    with start_server(*EXPLICIT, "--load-model", "*", store=store.root) as server:
        assert [one["name"] for one in server.stats()["models"]] == ["identity_fp32", "shift"]
    check_ended(run_convoy("serve", "--load-model", "shift", "--store", str(store.root)), 2, "model_control explicit")


def test_a_load_that_fails_keeps_what_serves_and_says_why(explicit: Server, store: StoreFolder) -> None:
    assert explicit.load("shift").status_code == 200
    broken = store.root / "shift" / "2" / "model.onnx"
    broken.parent.mkdir()
    broken.write_bytes(b"not a model")
    failed = explicit.load("shift")
    assert failed.status_code == 400
    assert failed.json()["error"].startswith("load failed for model 'shift': version 2 is at UNAVAILABLE state: ")
    assert explicit.shift() == ("1", 1.0)
    assert explicit.index()["shift/2"][0] == "UNAVAILABLE"
    missing = explicit.load("nobody")
    assert missing.status_code == 404
    assert missing.json()["error"].startswith("failed to load 'nobody', failed to poll from model repository")


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
            assert answer.status_code == 400, answer.text
            if 7 in policy.get("specific", {}).get("versions", ()):
                assert "wants version 7, and the store has 1, 2" in answer.json()["error"]
                assert "version 1, 2 serves" in answer.json()["error"]
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
    assert explicit.load("shift").status_code == 200
    assert explicit.shift() == ("3", 3.0)


def test_whatever_is_wrong_with_a_load_what_serves_goes_on(explicit: Server, store: StoreFolder) -> None:
    store.add_shift(2.0, version=2)
    config = store.root / "shift" / "config.pbtxt"
    assert explicit.load("shift").status_code == 200
    wrong = {
        'name: "other"': "name is 'other'",
        "max_batch_size: 4\nmaxbatch: 3": "line 2",
        'platform: "ensemble"': "ensemble",
        "version_policy { specific { versions: [ 9 ] } }": "version_policy in config.pbtxt wants version 9",
        "version_policy { specific {} }": "version_policy",
        'default_model_filename: "other.onnx"': "other.onnx",
        "input { name: 'z' }": "'z' is not in the graph",
        "max_batch_size": "line 1",
    }
    for text, words in wrong.items():
        config.write_text(text)
        for policy in ({}, {"version_policy": {"specific": {"versions": [1]}}}):
            answer = explicit.load("shift", **policy)
            is_met = policy and "version_policy" in text and "9" in text
            assert answer.status_code == (200 if is_met else 400), (text, answer.text)
            if is_met:
                assert explicit.shift() == ("1", 1.0)
                config.unlink()
                assert explicit.load("shift").status_code == 200
                continue
            assert words in answer.json()["error"], answer.text
            assert explicit.shift() == ("2", 2.0), text
    config.unlink()
    for policy in ({"max_batch_size": 1 << 30}, {"max_batch_size": "x"}, {"instance_group": []}):
        assert explicit.load("shift", **policy).status_code in (400, 501)
        assert explicit.shift() == ("2", 2.0)
    shutil.move(store.root / "shift", store.root / "moved")
    gone = explicit.load("shift")
    assert (gone.status_code, explicit.shift()) == (404, ("2", 2.0))
    assert "there is no version of it in the store" in gone.json()["error"]


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
            for broken, words in (("specific { versions: [ 9 ] }", "wants version 9"), ("}", "line 1")):
                wants(broken)
                wait_until(
                    lambda words=words: all(  # type: ignore[misc]
                        any(words in why for at, (_, why) in server.index().items() if at.split("/")[0] == name)
                        for name in ("shift", "digits")
                    ),
                    "it is told",
                )
                assert served() == [["2"], ["2"]]
            wants("latest {}")
            wait_until(lambda: served() == [["3"], ["3"]], "the highest serves")
            wait_until(lambda: not any(reason for _, reason in server.index().values() if reason != "unloaded"),
                       "nothing is wrong any more")  # fmt: skip
        assert_nobody_noticed(crowd)
    wants("specific { versions: [ 1, 3 ] }")
    with start_server("--version-policy", "1", store=store.root) as server:
        assert served() == [["1", "3"], ["1", "3"]]
        said = server.get("/v2/models/shift/config").json()["version_policy"]
        assert said == {"specific": {"versions": [1, 3]}}
        config = triton_grpc.InferenceServerClient(server.grpc_address).get_model_config("shift").config
        assert list(config.version_policy.specific.versions) == [1, 3]


def test_a_request_to_load_may_set_batch_size_and_versions_and_nothing_else(
    explicit: Server, store: StoreFolder
) -> None:
    assert explicit.load("shift", max_batch_size="16").status_code == 200
    assert explicit.get("/v2/models/shift/config").json()["max_batch_size"] == 16
    assert explicit.load("shift").status_code == 200
    assert explicit.get("/v2/models/shift/config").json()["max_batch_size"] == 32
    store.add_shift(2.0, version=2)
    assert explicit.load("shift", version_policy={"specific": {"versions": [1, "2"]}}).status_code == 200
    assert explicit.get("/v2/models/shift").json()["versions"] == ["1", "2"]
    wrong = [
        (explicit.load("shift", max_batch_size=-1), 400),
        (explicit.load("shift", version_policy={"newest": 3}), 400),
        (explicit.load("shift", version_policy={"latest": {"num_versions": 2}}), 200),
        (explicit.load("shift", name="other"), 400),
        (explicit.load("shift", platform="tensorflow_savedmodel"), 400),
        (explicit.load("shift", backend=["python"]), 400),
        (explicit.load("shift", name="shift", platform="onnxruntime_onnx", backend="onnxruntime"), 200),
        (explicit.load("shift", instance_group=[]), 501),
        (explicit.load("shift", max_batch_size=0), 200),
    ]
    assert [(answer.status_code, status) for answer, status in wrong if answer.status_code != status] == []
    for parameters, status in (({"config": "{"}, 400), ({"config": 3}, 400), ({"file:1/model.onnx": "eA=="}, 501)):
        answer = explicit.post("/v2/repository/models/shift/load", json={"parameters": parameters})
        assert answer.status_code == status, answer.text
        assert list(answer.json()) == ["error"]
    assert explicit.post("/v2/repository/models/shift/load", content=b"[]").status_code == 400
    assert explicit.post("/v2/repository/other/models/shift/load").status_code == 501
    assert explicit.shift()[0] == "2"


def test_triton_clients_load_and_unload_over_both_wires(explicit: Server) -> None:
    http = triton_http.InferenceServerClient(f"127.0.0.1:{explicit.port}")
    grpc = triton_grpc.InferenceServerClient(explicit.grpc_address)
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
    http.close()
    grpc.close()


def test_loading_unloading_and_asking_at_once_breaks_nothing(explicit: Server, store: StoreFolder) -> None:
    store.add_identity()
    assert explicit.load("identity_fp32").status_code == 200
    body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]}

    def steady(client: httpx.Client) -> httpx.Response:
        return client.post("/v2/models/identity_fp32/infer", json=body)

    def change(number: int) -> int:
        change = (explicit.load, explicit.unload)[number % 2]
        return change("shift").status_code

    with Crowd(explicit, 2, ask) as crowd, Crowd(explicit, 2, steady) as undisturbed, ThreadPoolExecutor(4) as pool:
        assert set(pool.map(change, range(40))) == {200}
    # 404 while it is unloaded, 503 while it is loaded anew; nothing that was taken fails.
    assert {attempt.status for attempt in crowd.attempts} <= {200, 404, 503}
    assert_nobody_noticed(undisturbed)
    assert explicit.stats()["inflight_bytes"] == 0


def test_reloading_under_load_loses_no_request(explicit: Server, store: StoreFolder) -> None:
    assert explicit.load("shift").status_code == 200
    with Crowd(explicit, 4, ask) as crowd:
        for number in range(10):
            store.add_shift(float(number))
            assert explicit.load("shift").status_code == 200
            assert explicit.shift() == ("1", float(number))
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
        statuses = {
            word: server.post(path, headers={"Authorization": f"Bearer {word}"}).status_code
            for word in ("nobody", "guest", "stranger", "boss")
        }
        assert statuses == {"nobody": 401, "guest": 401, "stranger": 401, "boss": 200}
        # The token opens nothing but this door.
        assert server.get("/v2/models/shift", headers={"Authorization": "Bearer boss"}).status_code == 401
        assert server.get("/v2/models/shift", headers={"Authorization": "Bearer guest"}).status_code == 200
        with triton_grpc.InferenceServerClient(server.grpc_address) as client:
            for word, code in (("guest", "StatusCode.UNAUTHENTICATED"), ("boss", None)):
                headers = {"authorization": f"Bearer {word}"}
                if code is None:
                    client.unload_model("shift", headers=headers)
                else:
                    with pytest.raises(InferenceServerException) as refused:
                        client.unload_model("shift", headers=headers)
                    assert refused.value.status() == code


def test_the_other_modes_refuse_to_load_in_tritons_words(polling: Server) -> None:
    for answer in (polling.load("shift"), polling.unload("shift")):
        assert answer.status_code == 503
        assert answer.json()["error"].startswith(NOT_ALLOWED)
    with triton_grpc.InferenceServerClient(polling.grpc_address) as client:
        with pytest.raises(InferenceServerException, match=NOT_ALLOWED) as refused:
            client.load_model("shift")
        assert refused.value.status() == "StatusCode.UNAVAILABLE"


def test_a_slow_upload_to_a_version_that_is_being_unloaded_is_still_answered(explicit: Server) -> None:
    from tests.support.wire import Wire, head

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
        assert reply.status == 200, reply.body
        assert np.allclose(reply.json()["outputs"][0]["data"], 1.0)
        assert unloading.result().status_code == 200
    assert explicit.index()["shift/1"] == ("UNAVAILABLE", "unloaded")
