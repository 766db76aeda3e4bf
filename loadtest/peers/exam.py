"""Whether a server's answers are right: the same samples for everybody, and the logits that the engine itself gives.

Knows the network's ONNX file and HTTP. A server is examined before and after each load, with as many requests at
once as the load has connections, because answers that go astray do so in batches.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import onnxruntime

from convoy.loadtest.bodies import Payload
from convoy.loadtest.peers.definition import Route
from convoy.loadtest.peers.forms import Floats
from convoy.models.errors import JobError

SAMPLES = 16
TOLERANCE = 1e-3
# Answers that differ by less could be mixed up and still pass.
_TELLING = 10 * TOLERANCE
_FEWEST_REQUESTS = 64
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Exam:
    """`samples` float32 [n, *shape], and `logits` float32 [n, k] that are the right answers."""

    input_name: str
    samples: Floats
    logits: Floats

    def payloads(self, route: Route) -> list[Payload]:
        """One request body for each sample."""
        return [route.form.ask(self.input_name, sample) for sample in self.samples]

    def first_answer(self, url: str, route: Route) -> bool:
        """Whether the server answers at all by now."""
        try:
            with httpx.Client(base_url=url, timeout=_TIMEOUT_S, trust_env=False, verify=False) as client:
                return _post(client, route, self.payloads(route)[0]).status_code == 200
        except httpx.HTTPError:
            return False

    def verify(self, url: str, route: Route, at_once: int) -> None:
        """Raises JobError for the first request without an answer, or with one not within 1e-3 of the right one."""
        payloads = self.payloads(route)
        limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
        with (
            httpx.Client(base_url=url, timeout=_TIMEOUT_S, limits=limits, trust_env=False, verify=False) as client,
            ThreadPoolExecutor(at_once) as crowd,
        ):

            def examine(number: int) -> None:
                which = number % len(payloads)
                try:
                    response = _post(client, route, payloads[which])
                except httpx.HTTPError as error:
                    raise JobError(f"gave no answer to a sound request ({type(error).__name__}: {error})") from error
                self._judge(response, which, route)

            list(crowd.map(examine, range(max(_FEWEST_REQUESTS, 2 * at_once))))

    def _judge(self, response: httpx.Response, which: int, route: Route) -> None:
        if response.status_code != 200:
            raise JobError(f"answered HTTP {response.status_code} to a sound request: {response.text[:200]}")
        try:
            logits = route.form.read(response.content)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise JobError(f"the answer is not in form {route.form.name} ({error}): {response.text[:200]}") from error
        right = self.logits[which]
        if logits.shape != right.shape or not np.allclose(logits, right, rtol=0, atol=TOLERANCE):
            raise JobError(f"answered {logits[:4].tolist()}... where {right[:4].tolist()}... is right")


def set_exam(model: Path, seed: int) -> Exam:
    """Draws samples and asks the engine. Raises JobError for a network that this comparison cannot use."""
    try:
        session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        (entry,) = session.get_inputs()
        shape = tuple(int(size) for size in entry.shape[1:])
    except Exception as error:  # onnxruntime's errors share no base class
        raise JobError(
            f"{model} cannot be used ({error}); it needs one float32 input [batch, ...] whose other sizes are fixed"
        ) from error
    samples = np.random.default_rng(seed).standard_normal((SAMPLES, *shape), dtype=np.float32)
    logits = session.run(None, {entry.name: samples})[0].reshape(SAMPLES, -1)
    apart = min(np.abs(logits[one] - logits[other]).max() for one in range(SAMPLES) for other in range(one))
    if apart < _TELLING:
        raise JobError(f"{model} answers nearly the same to every sample, so that mixed-up answers would pass")
    return Exam(entry.name, samples, logits)


def _post(client: httpx.Client, route: Route, payload: Payload) -> httpx.Response:
    return client.post(route.path, content=payload.body, headers=dict(payload.headers))
