"""What is sent: which body to which network over how many connections, and the right answers to it.

The samples of a load are the same for everybody, and so are the right answers: those of a bare ONNX Runtime session.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from PIL import Image
from tritonclient.grpc import service_pb2

from convoy.app.engines.onnx_session import new_session
from convoy.loadtest.bodies import Input, Payload, binary_payload, compact_json, image_payloads, json_payload
from convoy.loadtest.generator.grpc_sender import METHOD
from convoy.loadtest.grpc_client import infer_message
from convoy.loadtest.peers.beside.peer_pictures import decode
from convoy.loadtest.peers.servers import Route
from convoy.models.errors import JobError

Floats = npt.NDArray[np.float32]
# What reading raises.
NO_ANSWER = (ValueError, KeyError, TypeError, IndexError, DecodeError)
Sample = Any  # an array without a batch, or a picture's bytes
TOLERANCE = 1e-3
_CLASSES, _TOP = 10, 5  # of networks that are asked with pictures, and those that Convoy answers with
_SAMPLES, _FEWEST_REQUESTS, _TIMEOUT_S = 16, 64, 10.0


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """`connections`, each of which asks again as soon as it is answered. What begins with "overload" comes on a
    schedule, three times as much as can be answered; "start" sends nothing, and measures the time to the first answer.
    """

    name: str
    network: str
    body: str
    connections: int


_SMALL = {
    "tensor": ("cnn", "binary"),
    "json": ("cnn", "json"),
    "grpc": ("cnn", "grpc"),
    "png": ("digits", "picture"),
    "jpeg": ("thumbs", "picture"),
}
LARGE = ("mobilenet_v3_small", "resnet18")
_LARGE = {"tensor": "binary", "picture": "picture", "overload": "picture"}
# Of large ones twice a full batch: one computes while the next one gathers.
LOADS = {
    load.name: load
    for load in (
        *(PeerLoad(f"{name}-{count}", *how, count) for name, how in _SMALL.items() for count in (1, 16, 64)),
        *(PeerLoad(f"{name}-{network}", network, body, 32) for network in LARGE for name, body in _LARGE.items()),
        PeerLoad("start", "cnn", "binary", 1),
    )
}

# What is served, and the options of its export. "thumbs" computes next to nothing of 224x224 pixels.
_OF_32 = ("--input", "3x32x32", "--preprocess", "unit", "--resize", "32", "--crop", "32")
_OF_224 = ("--input", "3x224x224", "--preprocess", "imagenet", "--max-batch", "16")
_NETWORKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cnn": ("simple_cnn()", (*_OF_32, "--front", "none")),
    "digits": ("simple_cnn()", _OF_32),
    "thumbs": ("nn.Sequential(nn.Conv2d(3, 8, 16, stride=16), nn.ReLU(), nn.Flatten(), nn.Linear(1568, 10))", _OF_224),
    **{name: (f"torchvision.models.{name}(num_classes=10)", _OF_224) for name in LARGE},
}
# Answers that are all alike would not tell who got whose: norms count what they see, and the last layer spreads it.
_FACTORY = """import torch
import torchvision
from torch import nn
from convoy.models.zoo.simple_cnn import simple_cnn

def network():
    torch.manual_seed(0)
    made = {expression}.train()
    for one in made.modules():
        if isinstance(one, nn.BatchNorm2d):
            one.momentum = None
    with torch.no_grad():
        for _ in range(20):
            made(torch.randn(8, 3, {side}, {side}))
    nn.init.normal_([one for one in made.modules() if isinstance(one, nn.Linear)][-1].weight, std=0.5)
    return made.eval()
"""


def ensure_network(name: str, home: Path, model: Path | None) -> Path:
    """The network's ONNX file in a store of its own, exported now if it is not in `home`. Raises JobError.

    `model` is served in place of "cnn".
    """
    folder = (home / ("own" if name == "cnn" and model else "stores") / name).absolute()
    expression, options = _NETWORKS[name]
    file = folder / name / "1" / "fp32.onnx"
    if name == "cnn" and model is not None:
        file = file.with_name("model.onnx")
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(model, file)
    elif not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        factory = folder.with_suffix(".py")
        factory.write_text(_FACTORY.format(expression=expression, side=224 if options is _OF_224 else 32))
        what = (f"{factory}:network", "--name", name, *options, "--random-weights", "--precisions", "fp32")
        export = (sys.executable, "-m", "convoy", "export", *what, "--store", str(folder))
        done = subprocess.run(export, capture_output=True, text=True)
        if done.returncode != 0:
            raise JobError(f"the network {name} cannot be exported: {done.stderr.strip()[-300:]}")
    return file


def sides_px(load: PeerLoad) -> tuple[int, int]:
    """What a picture's shorter side becomes, and the square in its centre that counts; 0 and 0 for tensors."""
    if load.body != "picture":
        return 0, 0
    return (256, 224) if _NETWORKS[load.network][1] is _OF_224 else (32, 32)


def jpegs(width: int, height: int, count: int = _SAMPLES) -> list[bytes]:
    """Pictures with detail at every scale, fainter the finer it is, so that they cost what photographs cost."""
    lots, pictures = np.random.default_rng(0), []
    for _ in range(count):
        canvas = np.zeros((height, width, 3))
        for cells in (2, 8, 32, 128):
            coarse = Image.fromarray(lots.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
            canvas += np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)) / cells
        file = BytesIO()
        Image.fromarray((canvas * (255 / canvas.max())).astype(np.uint8)).save(file, "JPEG", quality=90)
        pictures.append(file.getvalue())
    return pictures


def _tensors(name: str, sample: Sample) -> tuple[list[Input], list[Sample]]:
    return [Input(name, "UINT8" if sample.dtype == np.uint8 else "FP32", (1, *sample.shape))], [sample]


_JSON = (("Content-Type", "application/json"),)
_BYTES = (("Content-Type", "application/octet-stream"),)


def _form_body(picture: bytes) -> Payload:
    """As browsers send a form whose one field is a file."""
    head = b'--peers\r\nContent-Disposition: form-data; name="image"; filename="image"\r\n'
    kind = b"Content-Type: image/%s\r\n\r\n" % (b"png" if picture.startswith(b"\x89PNG") else b"jpeg")
    return Payload(
        head + kind + picture + b"\r\n--peers--\r\n", (("Content-Type", "multipart/form-data; boundary=peers"),)
    )


# The ways in which servers want a sample, of an input of that name.
FORMS: dict[str, Callable[[str, Sample], Payload]] = {
    "raw": lambda _, sample: Payload(sample.tobytes(), _BYTES),
    "v2-binary": lambda name, sample: binary_payload(*_tensors(name, sample)),
    "v2-json": lambda name, sample: json_payload(*_tensors(name, sample)),
    "grpc": lambda name, sample: Payload(infer_message("cnn", *_tensors(name, sample)), ()),
    "flat-json": lambda _, sample: Payload(compact_json({"input": sample.ravel().tolist()}), _JSON),
    "nested-json": lambda _, sample: Payload(compact_json({"input": [sample.tolist()]}), _JSON),
    "picture": lambda _, picture: Payload(picture, _BYTES),
    "picture-form": lambda _, picture: _form_body(picture),
    "predictions": lambda _, picture: Payload(picture, _BYTES),
}


def read_answer(form: str, body: bytes) -> Floats:
    """The figures in an answer, flat. Raises one of NO_ANSWER where there are none."""
    if form == "raw":
        return np.frombuffer(body, "<f4")
    if form == "grpc":
        return np.frombuffer(service_pb2.ModelInferResponse.FromString(body).raw_output_contents[0], "<f4")
    # A binary answer's JSON ends where the tensor begins; latin-1 maps bytes to characters one to one.
    found, end = json.JSONDecoder().raw_decode(body.decode("latin-1"))
    if form == "v2-binary":
        return np.frombuffer(body[end:], "<f4", found["outputs"][0]["parameters"]["binary_data_size"] // 4)
    if form == "predictions":
        scores = dict.fromkeys(range(_CLASSES), 0.0) | {one["class_id"]: one["score"] for one in found["predictions"]}
        return np.array(list(scores.values()), np.float32)
    if isinstance(found, dict):
        found = found["output"] if "output" in found else found["outputs"][0]["data"]
    return np.array(found, np.float32).ravel()


def right_answer(form: str, logits: Floats) -> Floats:
    """What the form makes of the logits: themselves, or the best scores of softmax."""
    if form != "predictions":
        return logits
    shares: Floats = np.exp(logits - logits.max())
    return np.where(shares < np.sort(shares)[-_TOP], 0, shares / shares.sum())


@dataclass(frozen=True, slots=True)
class AnswerSheet:
    """`samples` are arrays or encoded pictures, and `logits` float32 [n, k] the right answers to them."""

    input_name: str
    samples: Sequence[Sample]
    logits: Floats

    def payloads(self, route: Route) -> list[Payload]:
        """One request body for each sample."""
        return [FORMS[route.form](self.input_name, sample) for sample in self.samples]

    def has_answer(self, url: str, route: Route) -> bool:
        """Whether the server answers at all by now."""
        with suppress(httpx.HTTPError, grpc.RpcError):
            return bool(_ask(url, route, self.payloads(route)[0]))
        return False

    def check(self, url: str, route: Route, at_once: int) -> None:
        """Raises JobError for the first request without an answer, or with one not within 1e-3 of the right one.

        So many requests at once: answers that go astray do so in batches.
        """
        payloads = self.payloads(route)

        def check_one(number: int) -> None:
            which = number % len(payloads)
            try:
                found = read_answer(route.form, _ask(url, route, payloads[which]))
            except (httpx.HTTPError, grpc.RpcError, *NO_ANSWER) as error:
                raise JobError(f"gave no answer to a sound request: {type(error).__name__}: {error}") from error
            right = right_answer(route.form, self.logits[which])
            if found.shape != right.shape or not np.allclose(found, right, rtol=0, atol=TOLERANCE):
                raise JobError(f"answered {found[:4].tolist()}... where {right[:4].tolist()}... is right")

        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(check_one, range(max(_FEWEST_REQUESTS, 2 * at_once))))


def _ask(url: str, route: Route, payload: Payload) -> bytes:
    if route.form == "grpc":
        with grpc.insecure_channel(url.removeprefix("grpc://")) as channel:
            answer: bytes = channel.unary_unary(METHOD)(payload.body, timeout=_TIMEOUT_S)
            return answer
    with httpx.Client(trust_env=False, verify=False, timeout=_TIMEOUT_S) as client:
        return (
            client.post(url + route.path, content=payload.body, headers=dict(payload.headers))
            .raise_for_status()
            .content
        )


def answer_sheet(file: Path, load: PeerLoad) -> AnswerSheet:
    """Draws samples and asks the engine. Raises JobError for a network that cannot be compared with."""
    try:
        session = new_session(file)
        (entry,) = session.get_inputs()
        shape = tuple(int(size) for size in entry.shape[1:])
    except Exception as error:  # onnxruntime's errors share no base class
        raise JobError(f"{file}: {error}; it needs one input [batch, ...] whose other sizes are fixed") from error
    pictures = list[bytes]()
    tensors = np.random.default_rng(0).standard_normal((_SAMPLES, *shape), dtype=np.float32)
    if entry.type == "tensor(uint8)":
        is_small = load.network == "digits"
        pictures = [one.body for one in image_payloads()[:_SAMPLES]] if is_small else jpegs(500, 375)
        tensors = np.stack([decode(picture, *((32, 32) if is_small else (256, 224))) for picture in pictures])
    logits = session.run(None, {entry.name: tensors})[0].reshape(_SAMPLES, -1)
    apart = min(np.abs(logits[one] - logits[other]).max() for one in range(_SAMPLES) for other in range(one))
    # Answers that differ by less could be mixed up and still pass.
    if apart < 10 * TOLERANCE:
        raise JobError(f"{file} answers nearly the same to every sample, so that mixed-up answers would pass")
    return AnswerSheet(entry.name, pictures if load.body == "picture" else list(tensors), logits)
