"""A peer's definition, its bodies and answers, and the process that it becomes."""

from __future__ import annotations

import email
import json
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from convoy.loadtest.bodies import image_payloads
from convoy.loadtest.peers.beside.peer_pictures import decode
from convoy.loadtest.peers.loads import (
    FORMS,
    LOADS,
    NO_ANSWER,
    answer_sheet,
    jpegs,
    read_answer,
    right_answer,
)
from convoy.loadtest.peers.servers import (
    DEFINITION,
    HERE,
    REQUIREMENTS,
    SERVER,
    Contender,
    Setting,
    find_contender,
)
from convoy.models.errors import JobError, UsageError
from convoy.models.images import preprocess
from tests.support.onnx_models import identity, shift
from tests.support.pictures import SMALL
from tests.support.stores import ROOT

SAMPLE = np.arange(12, dtype=np.float32).reshape(3, 2, 2) / 7
FIGURES = np.float32([1.5, -2])


@pytest.mark.parametrize("folder", sorted(HERE.glob("*/peer.toml")), ids=lambda file: file.parent.name)
def test_every_peer_can_be_read_and_is_wholly_pinned_with_our_engine(folder: Path) -> None:
    peer = msgspec.toml.decode(folder.read_text(), type=Contender)
    assert {route.form for route in peer.bodies.values()} <= FORMS.keys()
    assert peer.bodies.keys() <= {load.body for load in LOADS.values()}
    assert folder.with_name(SERVER).is_file()
    assert peer.settings[0] == Setting(1, 0.0)  # no batching is always among them
    assert len(set(peer.settings)) == len(peer.settings)
    if folder.with_name(REQUIREMENTS).exists():
        lines = folder.with_name(REQUIREMENTS).read_text().split()
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line) for line in lines)
        ours = re.search(r"^onnxruntime==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
        assert ours[0] in lines


def test_an_unknown_peer_and_a_broken_definition_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="known are bare, bentoml"):
        find_contender("mosaic", None, tmp_path)
    (tmp_path / "mine").mkdir()
    for text in ("title = ", 'title = "x"\nbodies = 3', 'title = "x"\ncolour = 1\n[bodies]'):
        (tmp_path / "mine" / DEFINITION).write_text(text)
        with pytest.raises(UsageError, match=re.escape(str(tmp_path / "mine" / DEFINITION))):
            find_contender("mine", tmp_path, tmp_path)


V2_HEAD = '{"outputs":[{"name":"y","shape":[1,2],"datatype":"FP32"'
ANSWERS = {
    "raw": FIGURES.tobytes(),
    "v2-binary": V2_HEAD.encode() + b',"parameters":{"binary_data_size":8}}]}' + FIGURES.tobytes(),
    "v2-json": V2_HEAD.encode() + b',"data":[1.5,-2.0]}]}',
    "flat-json": b'{"output":[1.5,-2.0]}',
    "nested-json": b"[[1.5,-2.0]]",
    "picture": b'{"output":[1.5,-2.0]}',
    "picture-form": b"[[1.5,-2.0]]",
    "grpc": service_pb2.ModelInferResponse(raw_output_contents=[FIGURES.tobytes()]).SerializeToString(),
}


@pytest.mark.parametrize("form", sorted(FORMS))
def test_every_form_finds_the_logits_and_refuses_what_is_no_answer(form: str) -> None:
    if form == "predictions":
        logits = np.arange(10, dtype=np.float32)
        shares = np.exp(logits) / np.exp(logits).sum()
        best = [{"class_id": int(index), "score": float(shares[index])} for index in range(9, 4, -1)]
        found = read_answer(form, json.dumps({"predictions": best}).encode())
        np.testing.assert_allclose(right_answer(form, logits), found, atol=1e-6)
    else:
        np.testing.assert_array_equal(read_answer(form, ANSWERS[form]), right_answer(form, FIGURES))
    with pytest.raises(NO_ANSWER):
        read_answer(form, b'{"error": "no"}')


def test_bodies_carry_the_sample_as_it_is() -> None:
    assert FORMS["raw"]("x", SAMPLE).body == SAMPLE.tobytes()
    asked = FORMS["v2-binary"]("x", SAMPLE)
    head = int(dict(asked.headers)["Inference-Header-Content-Length"])
    assert asked.body[head:] == SAMPLE.tobytes()
    picture = image_payloads()[0].body
    assert FORMS["picture"]("x", picture).body == picture
    asked = FORMS["picture-form"]("x", picture)
    message = email.message_from_bytes(f"Content-Type: {asked.headers[0][1]}\r\n\r\n".encode() + asked.body)
    (part,) = message.get_payload()
    assert (part.get_param("name", header="content-disposition"), part.get_content_type()) == ("image", "image/png")
    assert part.get_payload(decode=True) == picture


@pytest.mark.parametrize("size", [(340, 256), (500, 375), (224, 300)])
def test_peers_make_of_a_picture_what_we_make_of_it(size: tuple[int, int]) -> None:
    image = replace(SMALL, height=224, width=224, resize_mode="shorter_side", resize_px=256)
    for picture in jpegs(*size, count=2):
        np.testing.assert_array_equal(decode(picture, 256, 224), preprocess(picture, image))


def test_the_answer_sheet_has_the_engines_own_answers_and_refuses_what_proves_nothing(tmp_path: Path) -> None:
    load = LOADS["tensor-1"]
    sheet = answer_sheet(identity(tmp_path / "identity.onnx", dims=("batch", 3, 2)), load)
    np.testing.assert_array_equal(sheet.logits, np.stack(sheet.samples).reshape(len(sheet.samples), -1))
    with pytest.raises(JobError, match="sizes are fixed"):
        answer_sheet(identity(tmp_path / "open.onnx"), load)
    with pytest.raises(JobError, match="nearly the same"):
        answer_sheet(shift(tmp_path / "far.onnx", 1e12), load)  # so far that float32 loses what differed
