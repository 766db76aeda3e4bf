"""Whether a server's answers are right: the same samples for everybody, and what the engine itself gives for them.

Knows the network's ONNX file, HTTP and gRPC. A server is examined before and after each load, with as many requests at
once as the load has connections, because answers that go astray do so in batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from convoy.loadtest.peers.forms import Floats, Sample

from convoy.app.engines.onnx_session import new_session
from convoy.loadtest.bodies import Payload, image_payloads
from convoy.loadtest.endpoint import find_endpoint
from convoy.loadtest.grpc_channel import channel_options, open_channel
from convoy.loadtest.peers.beside.peer_pictures import decode
from convoy.loadtest.peers.definition import Route
from convoy.loadtest.peers.network import ServedNetwork
from convoy.loadtest.peers.pictures import jpegs
from convoy.loadtest.peers.results import BodyKind
from convoy.models.errors import JobError

SAMPLES = 16
TOLERANCE = 1e-3
# Answers that differ by less could be mixed up and still pass.
_TELLING = 10 * TOLERANCE
_FEWEST_REQUESTS = 64
_TIMEOUT_S = 10.0

PICTURES: dict[BodyKind, Callable[[], list[bytes]]] = {
    "png": lambda: [payload.body for payload in image_payloads()[:SAMPLES]],
    "jpeg340": lambda: jpegs((340, 256)),
    "jpeg500": lambda: jpegs((500, 375)),
}

Ask = Callable[[Payload], bytes]


@dataclass(frozen=True, slots=True)
class Exam:
    """`samples` are arrays or encoded pictures, and `logits` float32 [n, k] the right answers to them."""

    input_name: str
    samples: Sequence[Sample]
    logits: Floats

    def payloads(self, route: Route) -> list[Payload]:
        """One request body for each sample."""
        return [route.form.ask(self.input_name, sample) for sample in self.samples]

    def first_answer(self, url: str, route: Route) -> bool:
        """Whether the server answers at all by now."""
        try:
            with _asking(url, route, 1) as ask:
                ask(self.payloads(route)[0])
        except JobError:
            return False
        return True

    def verify(self, url: str, route: Route, at_once: int) -> None:
        """Raises JobError for the first request without an answer, or with one not within 1e-3 of the right one."""
        payloads = self.payloads(route)
        with _asking(url, route, at_once) as ask, ThreadPoolExecutor(at_once) as crowd:

            def examine(number: int) -> None:
                which = number % len(payloads)
                self._judge(ask(payloads[which]), which, route)

            list(crowd.map(examine, range(max(_FEWEST_REQUESTS, 2 * at_once))))

    def _judge(self, body: bytes, which: int, route: Route) -> None:
        try:
            found = route.form.read(body)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise JobError(f"the answer is not in form {route.form.name} ({error}): {_excerpt(body)}") from error
        right = route.form.expect(self.logits[which])
        if found.shape != right.shape or not np.allclose(found, right, rtol=0, atol=TOLERANCE):
            raise JobError(f"answered {found[:4].tolist()}... where {right[:4].tolist()}... is right")


def set_exam(network: ServedNetwork, body: BodyKind, seed: int) -> Exam:
    """Draws samples and asks the engine. Raises JobError for a network that this comparison cannot use."""
    try:
        session = new_session(network.file)
        (entry,) = session.get_inputs()
        shape = tuple(int(size) for size in entry.shape[1:])
    except Exception as error:  # onnxruntime's errors share no base class
        raise JobError(
            f"{network.file} cannot be used ({error}); it needs one input [batch, ...] whose other sizes are fixed"
        ) from error
    lots = np.random.default_rng(seed)
    samples: Any
    if body in PICTURES:
        samples = PICTURES[body]()
        tensors = np.stack([decode(picture, network.resize_px, network.crop_px) for picture in samples])
    elif entry.type == "tensor(uint8)":
        samples = tensors = lots.integers(0, 256, (SAMPLES, *shape), dtype=np.uint8)
    else:
        samples = tensors = lots.standard_normal((SAMPLES, *shape), dtype=np.float32)
    logits = session.run(None, {entry.name: tensors})[0].reshape(len(tensors), -1)
    apart = min(np.abs(logits[one] - logits[other]).max() for one in range(len(logits)) for other in range(one))
    if apart < _TELLING:
        raise JobError(f"{network.file} answers nearly the same to every sample, so that mixed-up answers would pass")
    return Exam(entry.name, samples, logits)


@contextmanager
def _asking(url: str, route: Route, at_once: int) -> Iterator[Ask]:
    """What asks gives the answer's body, and raises JobError where there is none or where it is an error."""
    if route.form.wire == "grpc":
        with _asking_grpc(url) as ask:
            yield ask
        return
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
    with httpx.Client(base_url=url, timeout=_TIMEOUT_S, limits=limits, trust_env=False, verify=False) as client:

        def post(payload: Payload) -> bytes:
            try:
                response = client.post(route.path, content=payload.body, headers=dict(payload.headers))
            except httpx.HTTPError as error:
                raise JobError(f"gave no answer to a sound request ({type(error).__name__}: {error})") from error
            if response.status_code != 200:
                raise JobError(f"answered HTTP {response.status_code} to a sound request: {response.text[:200]}")
            return response.content

        yield post


@contextmanager
def _asking_grpc(url: str) -> Iterator[Ask]:
    import grpc

    from convoy.loadtest.generator.grpc_sender import METHOD

    endpoint = find_endpoint(url)
    with open_channel(grpc, endpoint, channel_options(endpoint)) as channel:
        infer = channel.unary_unary(METHOD)

        def call(payload: Payload) -> bytes:
            try:
                answer: bytes = infer(payload.body, timeout=_TIMEOUT_S)
            except grpc.RpcError as error:
                raise JobError(f"answered {error.code().name} to a sound request: {error.details()}") from error
            return answer

        yield call


def _excerpt(body: bytes) -> str:
    return body[:200].decode("utf-8", "backslashreplace")
