"""Networks that take images of any height and width, from an ONNX file to answers over every wire."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime
import psutil
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http

from convoy.app.engines.measure import Pace
from convoy.export.command import export_bundle
from convoy.export.options import ExportOptions
from tests.support.onnx_models import convolutions
from tests.support.servers import Server, start_server

SIZES = ((40, 40), (64, 33), (17, 96))
MODELS = ("scores", "maps", "valid", "bare")


def original(folder: Path, name: str) -> Path:
    """What a model of the store was made of."""
    return folder / "originals" / f"{name}.onnx"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("free")
    with pytest.MonkeyPatch.context() as patches:
        pace = Pace(budget_s=0, limit_s=10, warm_up=1, fewest=2, most=2)
        patches.setattr("convoy.export.profiling.profile.PACE", pace)
        for name in MODELS:
            path = convolutions(original(folder, name), "valid" if name == "bare" else name)
            if name == "bare":
                convolutions(folder / "store" / name / "1" / "model.onnx", "valid")
            else:
                options = ExportOptions(
                    str(path), name, store=folder / "store", plan_cache=folder / "plans", max_batch=8
                )
                export_bundle(options)
    return folder


@pytest.fixture(scope="module", params=["0", "1"], ids=["one-process", "an-edge"])
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[Server]:
    with start_server("--edges", request.param, "--max-batch", "8", store=folder / "store") as server:
        yield server


def pictures(size: tuple[int, int], rows: int = 2) -> np.ndarray:
    return np.random.default_rng(sum(size)).standard_normal((rows, 3, *size)).astype(np.float32)


def expected(folder: Path, model: str, images: np.ndarray) -> np.ndarray:
    return np.asarray(onnxruntime.InferenceSession(str(original(folder, model))).run(None, {"x": images})[0])


def asked(server: Server, model: str, images: np.ndarray, wire: str) -> np.ndarray:
    library, address = (over_grpc, server.grpc_address) if wire == "grpc" else (over_http, f"127.0.0.1:{server.port}")
    tensor = library.InferInput("x", images.shape, "FP32")
    if wire == "grpc":
        tensor.set_data_from_numpy(images)
        output = library.InferRequestedOutput("y")
    else:
        tensor.set_data_from_numpy(images, binary_data=wire == "binary")
        output = library.InferRequestedOutput("y", binary_data=wire == "binary")
    with library.InferenceServerClient(address) as client:
        return np.asarray(client.infer(model, [tensor], outputs=[output]).as_numpy("y"))


@pytest.mark.parametrize("wire", ["binary", "json", "grpc"])
@pytest.mark.parametrize("model", MODELS)
def test_three_sizes_are_answered_as_the_original_does(server, folder, model, wire):
    for size in SIZES:
        images = pictures(size)
        answers, want = asked(server, model, images, wire), expected(folder, model, images)
        assert answers.shape == want.shape
        assert np.allclose(answers, want, atol=1e-5)


def test_metadata_and_configuration_say_which_sizes_are_free(server):
    (tensor,) = server.get("/v2/models/maps").json()["inputs"]
    assert tensor["shape"] == [-1, 3, -1, -1]
    assert server.get("/v2/models/maps/config").json()["input"][0]["dims"] == [3, -1, -1]


def test_what_does_not_fit_the_network_is_an_error_that_costs_nobody_else(server, folder):
    with pytest.raises(Exception, match="unexpected shape for input 'x'"):
        asked(server, "maps", np.zeros((1, 4, 32, 32), np.float32), "binary")
    with pytest.raises(Exception, match="the model 'valid' fails on this request"):
        asked(server, "valid", pictures((4, 4)), "binary")
    images = pictures(SIZES[0])
    assert np.allclose(asked(server, "valid", images, "binary"), expected(folder, "valid", images), atol=1e-5)


def test_sizes_that_come_together_are_each_answered_in_batches_of_their_own(server, folder):
    images = [pictures(size, rows=1) for size in SIZES] * 8
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda one: asked(server, "maps", one, "binary"), images))
    for one, answer in zip(images, answers, strict=True):
        assert np.allclose(answer, expected(folder, "maps", one), atol=1e-5)


def test_a_picture_far_larger_than_the_others_leaves_no_memory_behind(server, folder):
    def own_bytes() -> int:
        root = psutil.Process(server.process.pid)
        return sum(process.memory_full_info().uss for process in (root, *root.children(recursive=True)))

    large = pictures((2048, 1536), rows=1)
    asked(server, "maps", pictures(SIZES[0]), "binary")
    before = own_bytes()
    for _ in range(2):
        assert np.allclose(asked(server, "maps", large, "binary"), expected(folder, "maps", large), atol=1e-4)
    # Between its convolutions the network has 96 MiB of it; 36 come in and 48 go out.
    assert own_bytes() - before < 80 << 20, (before, own_bytes())
