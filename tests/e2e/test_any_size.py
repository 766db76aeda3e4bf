"""Networks that take images of any height and width, from an ONNX file to answers over every wire."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from PIL import Image
from tritonclient.utils import np_to_triton_dtype

from convoy.app.engines.onnx_session import new_session
from convoy.export.command import export_bundle
from convoy.export.options import ExportOptions
from convoy.models.bundle import Bundle
from tests.support.onnx_models import convolutions
from tests.support.pictures import saved
from tests.support.quick_exports import export_network, measure_little
from tests.support.servers import Server, metric, start_server

SIZES = ((40, 40), (64, 33), (17, 96))
EXPORTED = ("scores", "maps", "valid")


def original(folder: Path, name: str) -> Path:
    """What a model of the store was made of."""
    return folder / "originals" / f"{name}.onnx"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("free")
    convolutions(original(folder, "bare"), "valid")
    convolutions(folder / "store" / "bare" / "1" / "model.onnx", "valid")
    places = {"store": folder / "store", "plan_cache": folder / "plans"}
    with pytest.MonkeyPatch.context() as patches:
        measure_little(patches)
        for name in EXPORTED:
            export_bundle(ExportOptions(str(convolutions(original(folder, name), name)), name, max_batch=8, **places))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with start_server("--max-batch", "8", store=folder / "store") as server:
        yield server


def pictures(size: tuple[int, int], rows: int = 2) -> np.ndarray:
    return np.random.default_rng(sum(size)).standard_normal((rows, 3, *size)).astype(np.float32)


def expected(folder: Path, model: str, images: np.ndarray) -> np.ndarray:
    return np.asarray(new_session(original(folder, model)).run(None, {"x": images})[0])


def asked(server: Server, model: str, images: np.ndarray, wire: str, name: str = "x", wanted: str = "y") -> np.ndarray:
    library, address = (over_grpc, server.grpc_address) if wire == "grpc" else (over_http, f"127.0.0.1:{server.port}")
    tensor = library.InferInput(name, images.shape, np_to_triton_dtype(images.dtype))
    form = {} if wire == "grpc" else {"binary_data": wire == "binary"}
    tensor.set_data_from_numpy(images, **form)
    output = library.InferRequestedOutput(wanted, **form)
    with library.InferenceServerClient(address) as client:
        return np.asarray(client.infer(model, [tensor], outputs=[output]).as_numpy(wanted))


@pytest.mark.parametrize("wire", ["binary", "json", "grpc"])
@pytest.mark.parametrize("model", [*EXPORTED, "bare"])
def test_three_sizes_are_answered_as_the_original_does(server, folder, model, wire):
    for size in SIZES:
        images = pictures(size)
        answers, want = asked(server, model, images, wire), expected(folder, model, images)
        np.testing.assert_allclose(answers, want, rtol=1e-5, atol=1e-5)


def test_metadata_and_configuration_say_which_sizes_are_free(server):
    (tensor,) = server.get("/v2/models/maps").json()["inputs"]
    assert tensor["shape"] == [-1, 3, -1, -1]
    assert server.get("/v2/models/maps/config").json()["input"][0]["dims"] == [3, -1, -1]


def test_what_does_not_fit_the_network_is_an_error_that_costs_nobody_else(server, folder):
    with pytest.raises(Exception, match="unexpected shape for input 'x'"):
        asked(server, "maps", np.zeros((1, 4, 32, 32), np.float32), "binary")
    with pytest.raises(Exception, match="model 'valid' failed on this request"):
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


def test_how_many_shapes_are_warm_and_what_they_take_is_told_with_the_limits(server, folder):
    for size in (*SIZES, (48, 56)):
        asked(server, "maps", pictures(size), "binary")
    (told,) = [model["shapes"] for model in server.get("/stats").json()["models"] if model["name"] == "maps"]
    assert len(SIZES) < told["warm"] <= told["limit"] == 256
    assert 2 * 3 * 48 * 56 * 4 <= told["buffer_bytes"] <= told["buffer_limit_bytes"] == 1 << 20
    assert told["run_limit_bytes"] >= 0
    gauges = "warm_shapes", "warm_shapes_limit", "shape_buffer_bytes", "shape_buffer_limit_bytes"
    shown = [metric(server, f"convoy_{name}", model="maps", version="1") for name in gauges]
    assert shown == [told[key] for key in ("warm", "limit", "buffer_bytes", "buffer_limit_bytes")]


NETWORKS = """
import torch
from torch import nn

def convolutions():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()

def flattened():
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 32 * 40, 4))

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = convolutions()
    def forward(self, images):
        return self.inner(images) * (2 if images.shape[2] == 32 else 1)
"""


def of_torch(folder: Path, factory: str, **options: object) -> Bundle:
    file = folder / "networks.py"
    file.write_text(NETWORKS)
    return export_network(f"{file}:{factory}", folder, input="3x32?x40?", precisions="fp32", max_batch=8, **options)


@pytest.mark.slow
@pytest.mark.parametrize("front", ["uint8", pytest.param("none", marks=pytest.mark.long)])
def test_a_torch_network_is_exported_free_and_served_at_three_sizes_and_to_pictures(
    tmp_path, measures_little, forks_torch, front
):
    bundle = of_torch(tmp_path, "convolutions", front=front)
    assert bundle.manifest.provenance.free_sizes == ("32x40", "64x40", "32x104")
    network = runpy.run_path(str(tmp_path / "networks.py"))["convolutions"]()

    def answers_of_torch(images: np.ndarray) -> np.ndarray:
        import torch

        values = images.transpose(0, 3, 1, 2).astype(np.float32) / 255
        with torch.inference_mode():
            return np.asarray(network(torch.from_numpy(np.ascontiguousarray(values))))

    with start_server(store=tmp_path / "store") as server:
        for size in (*SIZES, (32, 40)):
            pixels = np.random.default_rng(sum(size)).integers(0, 256, (2, *size, 3), dtype=np.uint8)
            normalised = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2).astype(np.float32) / 255)
            given = pixels if front == "uint8" else normalised
            for wire in ("binary", "json", "grpc"):
                answers = asked(server, "net", given, wire, "images", "logits")
                assert np.allclose(answers, answers_of_torch(pixels), atol=1e-5)
        # A picture of any size is cropped to the recipe's, so that it needs no resizing here.
        answer = server.post("/predictions/net?top_k=4", content=saved(Image.fromarray(pixels[0]))).json()
        scores = {one["class_id"]: one["score"] for one in answer["predictions"]}
        powers = np.exp(answers_of_torch(pixels[:1])[0])
        assert np.allclose([scores[index] for index in range(4)], powers / powers.sum(), atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("factory", "why"),
    [
        ("flattened", "the network fails on float32 [3, 3, 64, 40]"),
        ("Branches", "it answers otherwise than torch at one of three sizes"),
    ],
)
def test_a_torch_network_that_cannot_be_free_is_fixed_and_says_why(
    tmp_path, measures_little, forks_torch, factory, why
):
    manifest = of_torch(tmp_path, factory).manifest
    assert manifest.spec.inputs[0].shape == (32, 40, 3)
    assert manifest.provenance.free_sizes == ()
    assert "height and width are fixed at 32x40: " in manifest.variants[0].reason
    assert why in manifest.variants[0].reason
