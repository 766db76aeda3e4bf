"""The house's GPU engine with a torch network in it, on a real device: slots, turns and graphs under threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convoy.app.engines.base import Engine, run_arrays
from convoy.app.engines.cuda.device import open_devices
from convoy.app.engines.cuda.driver import CudaUnavailable
from tests.gpu.proof.bare import HostMemory
from tests.gpu.proof.kinds import torch_on_gpu
from tests.gpu.proof.subjects import NotMade, make_digits
from tests.gpu.proof.torch_engine import TorchEngine, with_front

pytestmark = pytest.mark.gpu

SIZES = (1, 4, 16)
# Stays locked as long as the process lives, so it may never be given back.
LOCKED = HostMemory(1 << 20)


@pytest.fixture(scope="module")
def torch() -> Any:
    pytest.importorskip("onnx")
    try:
        open_devices()
        return torch_on_gpu()
    except (NotMade, CudaUnavailable) as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return make_digits(Path(tmp_path_factory.mktemp("digits")), with_int8=False).random


@pytest.fixture
def engine(torch: Any, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TorchEngine]:
    graphs, slots = getattr(request, "param", (True, 2))
    digits, device = make_digits(tmp_path, with_int8=False), open_devices()[0]
    network = with_front(torch, digits.make_network(), digits.spec, "fp32").to(device.name)
    one = TorchEngine(
        network, device, torch, digits.spec, batch_sizes=SIZES, precision="fp32", graphs=graphs, slots=slots
    )
    one.warm_up()
    yield one
    one.close()


def own_answers(torch: Any, engine: TorchEngine, pictures: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        answers: np.ndarray = engine._network(torch.from_numpy(pictures).cuda()).cpu().numpy()
    return answers


def ask(engine: Engine, pictures: np.ndarray) -> np.ndarray:
    return run_arrays(engine, {"images": pictures})["logits"]


@pytest.mark.parametrize("engine", [(graphs, slots) for graphs in (True, False) for slots in (2, 1)], indirect=True)
def test_it_answers_as_torch_does_at_every_size(torch: Any, engine: TorchEngine, pictures: np.ndarray) -> None:
    for size in (1, 3, 4, 11, 16):
        expected = own_answers(torch, engine, pictures[:size])
        np.testing.assert_allclose(ask(engine, pictures[:size]), expected, rtol=1e-3, atol=1e-3)


def test_every_slot_and_size_has_its_graph(engine: TorchEngine) -> None:
    assert engine.graphs == len(SIZES) * engine.info.slots


@pytest.mark.parametrize("engine", [(True, 2), (False, 2)], indirect=True)
def test_two_threads_get_their_own_answers(torch: Any, engine: TorchEngine, pictures: np.ndarray) -> None:
    batches = [
        pictures[start : start + size] for start, size in ((0, 16), (16, 5), (40, 1), (60, 16)) for _ in range(50)
    ]
    expected = [own_answers(torch, engine, batch) for batch in batches]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda batch: ask(engine, batch), batches))
    for got, wanted in zip(answers, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3)


def test_page_locked_requests_are_answered_alike(torch: Any, engine: TorchEngine, pictures: np.ndarray) -> None:
    memory = LOCKED
    memory.lock(engine)
    engine._gather.threshold_bytes = 0
    parts = [memory.part(engine, samples, place) for place, samples in enumerate((1, 3, 2))]
    result = engine.run(parts)
    for part, (answer,) in zip(parts, result.answers, strict=True):
        own = np.frombuffer(part.inputs[0], np.uint8).reshape(part.shapes[0])
        got = np.frombuffer(answer.data, np.float32).reshape(answer.shape)
        np.testing.assert_allclose(got, own_answers(torch, engine, own), rtol=1e-3, atol=1e-3)


def test_two_engines_share_the_device(torch: Any, engine: TorchEngine, pictures: np.ndarray, tmp_path: Path) -> None:
    digits = make_digits(tmp_path, with_int8=False)
    half = TorchEngine(
        with_front(torch, digits.make_network(), digits.spec, "fp16").to("cuda:0"),
        open_devices()[0],
        torch,
        digits.spec,
        batch_sizes=SIZES,
        precision="fp16",
    )
    try:
        half.warm_up()
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda turn: ask((engine, half)[turn % 2], pictures[:16]), range(100)))
    finally:
        half.close()
    expected = own_answers(torch, engine, pictures[:16])
    for got in answers:
        assert np.abs(got - expected).max() <= 2e-2 * np.abs(expected).max()
    # What is left goes on.
    np.testing.assert_allclose(ask(engine, pictures[:16]), expected, rtol=1e-3, atol=1e-3)
