"""A peer's definition, its bodies, and the process that it becomes."""

from __future__ import annotations

import email
import json
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from convoy.loadtest.peers.definition import HERE, KNOWN, REQUIREMENTS, SERVER, Peer, find_peers, read_peer
from convoy.loadtest.peers.environment import ensure_environment
from convoy.loadtest.peers.exam import Exam, set_exam
from convoy.loadtest.peers.forms import FORMS, ID_MARK
from convoy.loadtest.peers.generator import SenderTotals, choose_generator
from convoy.loadtest.peers.network import ServedNetwork
from convoy.loadtest.peers.pictures import jpegs
from convoy.loadtest.peers.results import Setting
from convoy.loadtest.peers.server import Launch, free_ports, serving
from convoy.loadtest.peers.stand import reading_of
from tritonclient.grpc import service_pb2

from convoy.loadtest.bodies import image_payloads
from convoy.loadtest.peers.beside.peer_pictures import decode
from convoy.models.errors import JobError, UsageError
from convoy.models.images import preprocess
from tests.support.onnx_models import identity, shift
from tests.support.pictures import SMALL
from tests.support.stores import ROOT

ECHO = ROOT / "tests" / "support" / "peers"
SAMPLE = np.arange(12, dtype=np.float32).reshape(3, 2, 2) / 7


@pytest.mark.parametrize("name", KNOWN)
def test_every_peer_is_wholly_pinned_and_has_our_engine(name: str) -> None:
    (peer,) = find_peers([name], None)
    lines = (peer.folder / REQUIREMENTS).read_text().split()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line) for line in lines)
    ours = re.search(r"^onnxruntime==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert ours is not None
    assert ours[0] in lines
    assert set(peer.versions()) == {peer.package, "onnxruntime", "numpy"}
    assert (peer.folder / SERVER).is_file()


@pytest.mark.parametrize("name", KNOWN)
def test_no_batching_is_always_among_the_settings(name: str) -> None:
    (peer,) = find_peers([name], None)
    assert peer.settings[0].title == "no batching"
    assert len(set(peer.settings)) == len(peer.settings)


def test_settings_are_every_size_with_every_window() -> None:
    (peer,) = find_peers(["echo"], ECHO)
    assert peer.settings == (Setting(1, 0.0), Setting(8, 0.5), Setting(8, None))
    assert [setting.title for setting in peer.settings] == ["no batching", "batch 8, 0.5 ms", "batch 8, its own window"]


def test_an_unknown_peer_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UsageError, match="mosec"):
        find_peers(["mosaic"], None)


@pytest.mark.parametrize("text", ["", "title = ", 'title = "x"\npackage = "x"\nbodies = 3'])
def test_a_broken_definition_is_refused_by_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "peer.toml").write_text(text)
    with pytest.raises(UsageError, match=re.escape(str(tmp_path))):
        read_peer(tmp_path)


def peer_that_needs(tmp_path: Path, python: str | None, requirement: str = "") -> Peer:
    (tmp_path / REQUIREMENTS).write_text(requirement)
    settings = (Setting(1, 0.0),)
    return Peer("small", tmp_path, "Small", "small", "", python, False, 5.0, {}, settings, {})


def test_an_environment_is_made_once_and_again_when_its_requirements_change(tmp_path: Path) -> None:
    peer, home = peer_that_needs(tmp_path, None), tmp_path / "home"
    python = ensure_environment(peer, home)
    assert python.exists()
    mark = python.parent / "mark"
    mark.touch()
    assert ensure_environment(peer, home) == python
    assert mark.exists()
    (tmp_path / REQUIREMENTS).write_text("\n")
    ensure_environment(peer, home)
    assert not mark.exists()


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"Small needs Python 2\.99"):
        ensure_environment(peer_that_needs(tmp_path, "2.99"), tmp_path)


V2_HEAD = '{"outputs":[{"name":"y","shape":[1,2],"datatype":"FP32"'
ANSWERS = {
    "raw": np.float32([1.5, -2]).tobytes(),
    "v2-binary": V2_HEAD.encode() + b',"parameters":{"binary_data_size":8}}]}' + np.float32([1.5, -2]).tobytes(),
    "v2-json": V2_HEAD.encode() + b',"data":[1.5,-2.0]}]}',
    "flat-json": b'{"output":[1.5,-2.0]}',
    "nested-json": b"[[1.5,-2.0]]",
    "image": b'{"output":[1.5,-2.0]}',
    "image-form": b'{"output":[1.5,-2.0]}',
    "image-form-nested": b"[[1.5,-2.0]]",
    "grpc": service_pb2.ModelInferResponse(raw_output_contents=[np.float32([1.5, -2]).tobytes()]).SerializeToString(),
}
ANSWERS["v2-binary-id"] = ANSWERS["v2-binary"]


def test_every_form_but_scores_is_read() -> None:
    assert FORMS.keys() - ANSWERS.keys() == {"predictions"}


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_every_form_finds_the_logits(name: str) -> None:
    np.testing.assert_array_equal(FORMS[name].read(ANSWERS[name]), np.float32([1.5, -2]))


@pytest.mark.parametrize("name", sorted(FORMS))
def test_what_is_no_answer_raises_what_the_exam_catches(name: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, IndexError)):
        FORMS[name].read(b'{"error": "no"}')


def test_binary_bodies_carry_the_sample_as_it_lies_in_memory() -> None:
    assert FORMS["raw"].ask("x", SAMPLE).body == SAMPLE.tobytes()
    asked = FORMS["v2-binary"].ask("x", SAMPLE)
    head = int(dict(asked.headers)["Inference-Header-Content-Length"])
    assert asked.body[head:] == SAMPLE.tobytes()


def test_scores_are_the_best_five_of_softmax() -> None:
    logits = np.arange(10, dtype=np.float32)
    shares = np.exp(logits) / np.exp(logits).sum()
    best = [{"class_id": int(index), "score": float(shares[index])} for index in range(9, 4, -1)]
    found = FORMS["predictions"].read(json.dumps({"predictions": best}).encode())
    np.testing.assert_allclose(FORMS["predictions"].expect(logits), found, atol=1e-6)


def test_a_request_with_an_id_is_the_one_without_it_and_has_a_place_for_another() -> None:
    for sample in (SAMPLE, SAMPLE.astype(np.uint8)):
        plain, asked = (FORMS[name].ask("x", sample) for name in ("v2-binary", "v2-binary-id"))
        head, plain_head = (
            one.body[: int(dict(one.headers)["Inference-Header-Content-Length"])] for one in (asked, plain)
        )
        assert json.loads(head) == {"id": ID_MARK, **json.loads(plain_head)}
        assert asked.body[len(head) :] == sample.tobytes()


def test_wrk_puts_another_number_in_the_place_of_each_id() -> None:
    assert f'string.rep("#", {len(ID_MARK)})' in (HERE / "wrk.lua").read_text()


def test_a_picture_is_sent_as_it_is_and_in_a_form() -> None:
    (picture,) = (payload.body for payload in image_payloads()[:1])
    assert FORMS["image"].ask("x", picture).body == picture
    asked = FORMS["image-form"].ask("x", picture)
    message = email.message_from_bytes(f"Content-Type: {asked.headers[0][1]}\r\n\r\n".encode() + asked.body)
    (part,) = message.get_payload()
    assert (part.get_param("name", header="content-disposition"), part.get_content_type()) == ("image", "image/png")
    assert part.get_payload(decode=True) == picture


@pytest.mark.parametrize("size", [(340, 256), (500, 375), (224, 300)])
def test_peers_make_of_a_picture_what_we_make_of_it(size: tuple[int, int]) -> None:
    image = replace(SMALL, height=224, width=224, resize_mode="shorter_side", resize_px=256)
    for picture in jpegs(size)[:2]:
        np.testing.assert_array_equal(decode(picture, 256, 224), preprocess(picture, image))


def exam_of(file: Path) -> Exam:
    return set_exam(ServedNetwork("cnn", file, file.parent, 0, 0), "binary", 0)


def test_the_exam_has_the_engines_own_answers(tmp_path: Path) -> None:
    exam = exam_of(identity(tmp_path / "identity.onnx", dims=("batch", 3, 2)))
    np.testing.assert_array_equal(exam.logits, exam.samples.reshape(len(exam.samples), -1))


def test_a_network_with_open_sizes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="sizes are fixed"):
        exam_of(identity(tmp_path / "open.onnx"))


def test_a_network_whose_answers_are_all_alike_proves_nothing(tmp_path: Path) -> None:
    network = shift(tmp_path / "far.onnx", 1e12)  # so far that float32 loses what differed
    with pytest.raises(JobError, match="nearly the same"):
        exam_of(network)


def test_a_server_that_hangs_up_fails_the_exam(tmp_path: Path) -> None:
    exam = exam_of(identity(tmp_path / "identity.onnx", dims=("batch", 4)))
    (peer,) = find_peers(["echo"], ECHO)
    with pytest.raises(JobError, match="gave no answer"):
        exam.verify(f"http://127.0.0.1:{free_ports().http}", peer.routes["json"], 2)


SERVES = """
import os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
class Always(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
print("starting", flush=True)
HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Always).serve_forever()
"""

IDLES = "import time; print('starting', flush=True); time.sleep(600)"


def script(text: str, port: int, within_s: float = 20.0) -> Launch:
    return Launch((sys.executable, "-c", text), {"PORT": str(port)}, within_s)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_server_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    port = free_ports().http
    others = set(psutil.Process().children(recursive=True))  # earlier tests may have left a helper of their own
    with serving("Small", script(SERVES, port), port, tmp_path, answers) as running:
        assert running.family.cpu_s() > 0
        _, child = (one for one in psutil.Process().children(recursive=True) if one not in others)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert not answers(running.url)


def test_a_server_that_ends_is_quoted(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        with (
            pytest.raises(JobError, match=r"(?s)Small ended with exit code 1.*Address already in use"),
            serving("Small", script(SERVES, port), port, tmp_path, lambda _: False),
        ):
            raise AssertionError("it serves on a port that is taken")


def test_a_server_that_is_never_ready_is_given_up_and_quoted(tmp_path: Path) -> None:
    port = free_ports().http
    with (
        pytest.raises(JobError, match=r"(?s)no answer within 0\.5 s.*starting"),
        serving("Small", script(IDLES, port, 0.5), port, tmp_path, lambda _: False),
    ):
        raise AssertionError("it counts as ready")


def test_ctrl_c_in_the_midst_of_a_start_leaves_nobody_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(*arguments, **options))
        signal.raise_signal(signal.SIGINT)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    port = free_ports().http
    with (
        pytest.raises(KeyboardInterrupt),
        serving("Small", script(IDLES, port), port, tmp_path, lambda _: True),
    ):
        raise AssertionError("Ctrl-C was forgotten")
    assert started[0].returncode is not None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_cpu_is_per_answer_and_nothing_where_there_was_none() -> None:
    assert reading_of(SenderTotals(2.0, 1000, 0, 1.0, 2.0, 0.01, None), 0.1).server_cpu_us == pytest.approx(100)
    nothing = reading_of(SenderTotals(2.0, 0, 5, 0.0, 0.0, 0.01, "reset"), 0.1)
    assert (nothing.server_cpu_us, nothing.rps, nothing.failed) == (0.0, 0.0, 5)


def test_wrk_is_asked_for_by_name_only_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "own" in choose_generator("auto").title
    with pytest.raises(UsageError, match="install it"):
        choose_generator("wrk")
