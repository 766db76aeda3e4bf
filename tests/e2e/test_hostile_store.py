"""A store that somebody else has filled, and names that somebody else has chosen."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from onnx import TensorProto, helper, numpy_helper
from tritonclient.utils import InferenceServerException

from convoy.models.bundle import MANIFEST, Manifest, seal
from convoy.models.records import from_jsonable
from tests.support.fake_server import DIE
from tests.support.servers import (
    Server,
    check_ended,
    rows_request,
    run_convoy,
    start_fake_server,
    start_server,
    wait_until,
)
from tests.support.stores import StoreFolder
from tests.support.wire import check_refused

pytestmark = pytest.mark.slow
EXPLICIT = ("--model-control", "explicit", "--host", "127.0.0.1")
POLL = ("--model-control", "poll", "--poll-interval-s", "0.05")
ROW = rows_request(0.0)
# Root may read everything, unless it gives that up.
UNPRIVILEGED = (
    ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all") if os.geteuid() == 0 else ()
)


def can_be_unprivileged() -> bool:
    return not UNPRIVILEGED or subprocess.run([*UNPRIVILEGED, "true"], check=False, capture_output=True).returncode == 0


# Names


def test_no_name_leads_out_of_the_store(tmp_path: Path, store: StoreFolder) -> None:
    """Beside it is another folder that is laid out as one."""
    store.add_shift(1.0)
    store.add_shift(1.0, name="inner")
    StoreFolder(tmp_path / "other").add_shift(2.0, name="a")
    shutil.copytree(tmp_path / "other" / "a", store.root / "inner" / "sub")
    names = ["../other/a", str(tmp_path / "other" / "a"), "inner/sub", "..", ".", "", "shift/../../other/a", "a\0b",
             "a\nb", "shift/", " shift", "x" * 300, "%2e%2e", "shift\\..", ".hidden", "é"]  # fmt: skip
    with (
        start_server(*EXPLICIT, store=store.root) as server,
        triton_grpc.InferenceServerClient(server.grpc_address) as client,
    ):
        for name in names:
            for call in (client.load_model, client.unload_model):
                with pytest.raises(InferenceServerException) as refused:
                    call(name)
                assert refused.value.status() == "StatusCode.INVALID_ARGUMENT", name
                assert "cannot be a model's name" in refused.value.message()
        escaped = ("..%2fother%2fa", "%2e%2e%2fother%2fa", "..%252fother%252fa", "%2Fetc", "x" * 300, "a%00b", "a%0Ab")
        for name in escaped:
            asked = {f"/v2/repository/models/{name}/{verb}": {} for verb in ("load", "unload")}
            for path, body in (asked | {f"/v2/models/{name}/infer": ROW, f"/predictions/{name}": ROW}).items():
                reply = server.post(path, json=body)
                assert reply.status_code in (400, 404, 405), (path, reply.text)
                assert list(reply.json()) == ["error", "code"]
            for path in (
                f"/models/{name}",
                *(f"/v2/models/{name}{end}" for end in ("", "/ready", "/stats", "/config")),
            ):
                assert server.get(path).status_code in (400, 404), path
        assert server.index() == {"inner": ("", ""), "shift": ("", "")}
        assert not re.search(r"INFO +loaded ", server.log)
        assert server.load("shift").status_code == 200


def test_a_name_at_the_start_that_is_none_is_one_line_and_2(store: StoreFolder) -> None:
    where = ("--store", str(store.root))
    for command in (("serve", *EXPLICIT, "--load-model", "a,../other/a", "--port", "0"), ("inspect", "../other/a")):
        ended = run_convoy(*command, *where)
        check_ended(ended, 2, "cannot be a model's name")
        assert len(ended.stderr.splitlines()) == 1


# Files elsewhere, and sizes


PIPES = (MANIFEST, "canary.safetensors", "fp32.onnx")
LABELLED = 'max_batch_size: 4 output [{{ name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] label_filename: "{}" }}]'


def add_labels(store: StoreFolder, secret: Path) -> None:
    """Label files that lie elsewhere, and one that does not."""
    names = {"up": "../../secret", "whole": str(secret), "fine": "labels/ok.txt", "pipe": "labels/pipe"}
    for name, label_file in names.items():
        folder = store.add_add_sub(name=f"labels-{name}").parents[1]
        (folder / "config.pbtxt").write_text(LABELLED.format(label_file))
        (folder / "labels").mkdir()
        (folder / "labels" / "ok.txt").write_text("one\n" * 16)
        (folder / "labels" / "pipe").symlink_to(secret.with_name("pipe"))


def external(path: Path, location: str) -> None:
    """A model that keeps its weights elsewhere."""
    weights = numpy_helper.from_array(np.arange(4, dtype=np.float32), "w")
    weights.ClearField("raw_data")
    weights.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "16")):
        weights.external_data.add(key=key, value=value)
    sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", sides[:1], sides[1:], [weights])
    path.parent.mkdir(parents=True, exist_ok=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    path.write_bytes(model.SerializeToString())


def add_weights(store: StoreFolder, secret: Path) -> None:
    """Weights that lie elsewhere, and some that do not."""
    places = {"up": "../../../secret", "whole": str(secret), "link": "link", "pipe": "pipe", "fine": "w"}
    for name, location in places.items():
        folder = store.root / f"weights-{name}" / "1"
        external(folder / "model.onnx", location)
        (folder / "w").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    (store.root / "weights-link" / "1" / "link").symlink_to(secret)
    os.mkfifo(store.root / "weights-pipe" / "1" / "pipe")


def changed_manifest(folder: Path, old: str, new: str) -> None:
    """The same bundle with another text in its manifest, sealed anew as anybody can."""
    document = json.loads((folder / MANIFEST).read_text().replace(old, new))
    document.pop("manifest_sha256")
    (folder / MANIFEST).chmod(0o644)
    (folder / MANIFEST).write_bytes(seal(from_jsonable(Manifest, document, "manifest")))


def add_manifests(store: StoreFolder) -> None:
    """Manifests that name files of others, and one that does not."""
    store.add_digits(name="digits")
    shutil.copy(store.root / "digits" / "1" / "fp32.onnx", store.root / "fp32.onnx")
    changed_manifest(store.add_digits(name="both"), '"fp32.onnx"', '"../../fp32.onnx"')
    changed_manifest(store.add_digits(name="variant"), '"file": "fp32.onnx"', '"file": "../../fp32.onnx"')
    changed_manifest(store.add_digits(name="unhashed"), '"file": "fp32.onnx"', '"file": "other.onnx"')


def add_pipes(store: StoreFolder) -> None:
    """A pipe in the place of any file of a model."""
    os.mkfifo(store.add_digits(name="pipe-beside") / "stray")
    bare, configured = (store.add_shift(5.0, name=f"pipe-{name}") for name in ("bare", "configured"))
    bundles = [store.add_digits(name=f"pipe-{name}") / name for name in PIPES]
    for place in (bare, configured.parents[1] / "config.pbtxt", *bundles):
        place.unlink(missing_ok=True)
        os.mkfifo(place)


def add_sizes(store: StoreFolder) -> None:
    """More than any machine has memory for, wherever it stands, and what is not too much."""
    store.add_shift(1.0, name="sound")
    store.add_shift(1.0, name="batch")
    (store.root / "batch" / "config.pbtxt").write_text("max_batch_size: 2147483647")
    store.add_identity("FP32", ("batch", "size"), name="dims")
    tensor = 'name: "{}" data_type: TYPE_FP32 dims: [ 9000000000000000 ]'
    (store.root / "dims" / "config.pbtxt").write_text(
        f"max_batch_size: 4 input [{{ {tensor.format('x')} }}] output [{{ {tensor.format('y')} }}]"
    )
    store.add_identity("FP32", ("batch", 1 << 40), name="graph")
    changed_manifest(store.add_digits(name="manifest"), '"max_batch_size": 64', '"max_batch_size": 2147483647')


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of all of these."""
    folder = tmp_path_factory.mktemp("strange")
    secret, store = folder / "secret", StoreFolder(folder / "store")
    secret.write_text("hunter2\n" * 16)
    os.mkfifo(folder / "pipe")
    add_labels(store, secret)
    add_weights(store, secret)
    add_manifests(store)
    add_pipes(store)
    add_sizes(store)
    with start_server(store=store.root) as server:
        yield server


REFUSED = {
    **dict.fromkeys(("labels-up", "labels-whole"), "is outside"),
    **dict.fromkeys(("labels-pipe", "weights-pipe", "pipe-beside", "pipe-bare", "pipe-configured"), "is a pipe"),
    **dict.fromkeys((f"pipe-{name}" for name in PIPES), "is a pipe"),
    **dict.fromkeys(("weights-up", "weights-whole", "weights-link"), "is outside its folder"),
    **dict.fromkeys(("both", "variant"), "names a file outside the bundle"),
    "unhashed": "no digest of 'other.onnx'",
    **dict.fromkeys(("batch", "manifest"), r"max_batch_size 2147483647 is too large .* use at most \d+,"),
    **dict.fromkeys(("dims", "graph"), "the tensors of one sample take"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_elsewhere_pipes_and_sizes_beyond_the_memory_are_refused(strange: Server, name: str) -> None:
    assert re.search(REFUSED[name], strange.index()[f"{name}/1"][1])


def test_what_lies_beside_them_and_is_sound_is_served(strange: Server) -> None:
    found = strange.index()
    assert found["labels-fine/1"] == found["digits/1"] == ("READY", "")
    assert [strange.shift(name)[1] for name in ("weights-fine", "sound")] == [0.0, 1.0]
    assert "hunter2" not in strange.post("/v2/repository/index").text + strange.log


def test_the_operators_word_lowers_a_batch_that_is_asked_for(store: StoreFolder) -> None:
    store.add_shift(1.0, name="batch")
    (store.root / "batch" / "config.pbtxt").write_text("max_batch_size: 2147483647")
    with start_server("--max-batch", "8", store=store.root) as server:
        assert server.index()["batch/1"] == ("READY", "")
        assert server.get("/v2/models/batch/config").json()["max_batch_size"] == 8


def test_a_batch_that_does_not_fit_is_refused_with_the_largest_that_would(store: StoreFolder) -> None:
    store.add_shift(1.0)
    store.add_digits()
    with start_server(*EXPLICIT, store=store.root) as server:
        assert server.load("shift").status_code == 200
        before = server.rss_bytes
        for asked in (2147483647, 1 << 20):
            refused = server.load("shift", max_batch_size=asked)
            check_refused(refused, 400, f"max_batch_size {asked} is too large")
            (largest,) = re.findall(r"use at most (\d+),", refused.json()["error"])
            assert 32 <= int(largest) <= 1 << 16
            assert server.load("digits", max_batch_size=asked).status_code == 400
        assert server.rss_bytes < before + (256 << 20)
        assert server.shift()[1] == 1.0
        assert (server.load("shift", max_batch_size=1024).status_code, server.shift()[1]) == (200, 1.0)
        with (
            triton_grpc.InferenceServerClient(server.grpc_address) as client,
            pytest.raises(InferenceServerException, match=r"INVALID_ARGUMENT.* at most"),
        ):
            client.load_model("shift", config=json.dumps({"max_batch_size": "2147483647"}))


# What cannot be read


def test_a_link_in_a_circle_is_refused_and_the_others_are_served(store: StoreFolder) -> None:
    for name in ("shift", "version", "file"):
        store.add_shift(1.0, name=name)
    (store.root / "file" / "2").mkdir()
    # Links to themselves, and what is told of each.
    links = {"loop": "loop", "version/2": "version/2", "file/2/model.onnx": "model.onnx"}
    for link in links:
        (store.root / link).symlink_to(link.rpartition("/")[2])
    with start_server(*POLL, store=store.root) as server:
        found = server.index()
        for link, words in links.items():
            state, reason = found[link.removesuffix("/model.onnx")]
            assert (state, words in reason, "symbolic links" in reason) == ("UNAVAILABLE", True, True), reason
        assert [server.shift(name)[1] for name in ("shift", "version", "file")] == [1.0, 1.0, 1.0]
        assert server.get("/v2/models/loop").status_code == 404
        assert {one["name"] for one in server.stats()["refused"]} == {"loop", "version", "file"}
        store.add_shift(2.0, version=2)
        wait_until(lambda: server.shift()[1] == 2.0, "what is sound is followed")
        (store.root / "loop").unlink()
        (store.root / "version" / "2").unlink()
        store.add_shift(6.0, name="version", version=2)
        wait_until(lambda: server.shift("version")[1] == 6.0, "what is mended is served")
        wait_until(lambda: "loop" not in server.index(), "what is gone is forgotten")
    check_ended(run_convoy("inspect", "--store", str(store.root)), 1)


@pytest.mark.skipif(not can_be_unprivileged(), reason="needs setpriv, or a user who is not root")
@pytest.mark.parametrize("mode", [POLL, EXPLICIT], ids=["polling", "explicit"])
def test_what_may_not_be_read_is_refused_and_the_others_are_served(store: StoreFolder, mode: tuple[str, ...]) -> None:
    store.add_shift(1.0)
    for name in ("folder", "version", "file"):
        store.add_shift(5.0, name=name)
        store.add_shift(6.0, name=name, version=2)
    locked = [store.root / "folder", store.root / "version" / "2", store.root / "file" / "2" / "model.onnx"]
    for path in locked:
        path.chmod(0o000)
    try:
        with start_server(*mode, store=store.root, under=UNPRIVILEGED) as server:
            if mode == EXPLICIT:
                assert server.load("shift").status_code == 200
                for name in ("folder", "version", "file"):
                    check_refused(server.load(name), 400, "ermission denied")
            found = server.index()
            for place in ("folder", "version/2", "file/2"):
                assert (found[place][0], "ermission denied" in found[place][1]) == ("UNAVAILABLE", True)
            assert [server.shift(name)[1] for name in ("shift", "version", "file")] == [1.0, 5.0, 5.0]
            if mode == POLL:
                store.add_shift(2.0, version=2)
                wait_until(lambda: server.shift()[1] == 2.0, "what is sound is followed")
                for path in locked:
                    path.chmod(0o755)
                wait_until(
                    lambda: [server.shift(name)[1] for name in ("folder", "version")] == [6.0, 6.0], "it is read"
                )
                store.root.joinpath("folder").chmod(0o000)
                wait_until(lambda: "folder" in server.index(), "its folder is locked again")
                assert server.shift("folder")[1] == 6.0, "loaded models keep serving"
                store.root.joinpath("folder").chmod(0o755)
                wait_until(lambda: "folder" not in server.index(), "and nothing is wrong any more")
    finally:
        for path in locked:
            path.chmod(0o755)


# What never ends


def test_a_load_that_hangs_holds_up_no_other_and_ends_as_refused() -> None:
    settings = {"model_control": "explicit", "host": "127.0.0.1", "load_timeout_s": 3}
    with start_fake_server(max_inflight_mb=512, **settings) as server, ThreadPoolExecutor(1) as pool:
        server.switch_on("hang_load", "rows")
        hanging = pool.submit(server.load, "rows")
        wait_until(lambda: server.index().get("rows/1", ("",))[0] == "LOADING", "it hangs")
        assert server.load("images").status_code == 200
        assert not hanging.done()
        assert server.get("/v2/models/images/ready").status_code == 200
        check_refused(hanging.result(), 400, "did not load within 3 s")
        assert "did not load within 3 s" in server.index()["rows/1"][1]
        check_refused(server.load("rows"), 400, "still hangs")
        server.switch_off("hang_load")
        wait_until(lambda: server.load("rows").status_code == 200, "its disk answers again")
        assert server.infer(1.0).status_code == 200


def test_a_version_that_hung_at_the_start_is_loaded_when_its_disk_answers() -> None:
    with start_fake_server(fake={"hang_from_start": "rows"}, model_control="none", load_timeout_s=1) as server:
        assert server.index()["rows/1"][0] == "UNAVAILABLE"
        server.switch_off("hang_load")
        wait_until(lambda: server.index()["rows/1"][0] == "READY", "it is loaded after all")
        assert server.infer(1.0).status_code == 200


def test_a_refused_size_of_batches_does_not_stay_in_force() -> None:
    """An engine that is lost afterwards is replaced as it was loaded."""
    with start_fake_server(model_control="explicit", host="127.0.0.1", load_model="rows") as server:
        check_refused(server.load("rows", max_batch_size=70_000), 400, "at most")
        assert server.infer(DIE).status_code == 503
        wait_until(server.is_ready, "the engine is replaced")
        assert server.infer(1.0).status_code == 200


def test_what_no_reader_expects_is_refused_in_words(store: StoreFolder) -> None:
    """Also by inspect, which goes on with the others."""
    (store.add_digits(name="deep") / MANIFEST).write_text("[" * 200_000)
    store.add_digits(name="well")
    check_ended(run_convoy("inspect", "--store", str(store.root)), 1, "not valid JSON", "well version 1")


def test_while_polling_a_load_that_hangs_holds_up_no_other_and_is_tried_again() -> None:
    settings = {"model_control": "poll", "poll_interval_s": 0.05, "load_timeout_s": 3}
    with start_fake_server(**settings) as server:
        server.switch_on("hang_load", "rows")
        (server.store / "rows" / "2").mkdir()
        wait_until(lambda: server.index().get("rows/2", ("",))[0] == "LOADING", "it hangs")
        (server.store / "images" / "2").mkdir()
        wait_until(lambda: server.index().get("images/2", ("",))[0] == "READY", "the other is loaded")
        assert server.index()["rows/2"][0] == "LOADING"
        wait_until(lambda: "did not load within 3 s" in server.index()["rows/2"][1], "it is given up")
        assert server.infer(1.0).json()["model_version"] == "1"
        server.switch_off("hang_load")
        wait_until(lambda: server.index()["rows/2"][0] == "READY", "its disk answers again")


@pytest.mark.parametrize("mode", ["none", "poll", "explicit"])
def test_the_process_ends_while_a_load_hangs(mode: str) -> None:
    settings = {"model_control": mode, "host": "127.0.0.1", "poll_interval_s": 0.05, "max_inflight_mb": 512}
    starting = start_fake_server(fake={"hang_from_start": "rows"}, wait_ready=mode == "explicit", **settings)
    with ThreadPoolExecutor(1) as pool, starting as server:
        if mode == "explicit":
            pool.submit(server.load, "rows")
        wait_until(lambda: server.index().get("rows/1", ("",))[0] == "LOADING", "it hangs")
        server.signal()
        assert server.wait(60) == 0
        assert "shut down:" in server.log
