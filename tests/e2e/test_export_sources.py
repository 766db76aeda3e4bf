"""Where networks come from, with real torch: published weights, archives, and what goes wrong."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path

import numpy as np
import pytest

from convoy.export.class_names import read_labels
from convoy.export.command import export_bundle
from convoy.export.options import ExportOptions
from convoy.export.sources import onnx_file
from convoy.export.sources.torch_job import Inquiry
from convoy.export.sources.torch_process import ask
from convoy.models.bundle import Bundle
from convoy.models.errors import JobError, UsageError
from tests.support.quick_exports import export_network, logits_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.usefixtures("measures_little", "forks_torch")]

NETWORKS = """
    import resource, torch
    from torch import nn

    def net(channels=3, classes=4):
        return nn.Sequential(
            nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes))

    def four(): return net(channels=4)

    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()

    class Unsupported(Wrong):
        def forward(self, images): return self.inner(images) + torch.linalg.eigvals(images[:, 0]).real[:, :4]

    def greedy():
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
        return nn.Linear(1 << 14, 1 << 14)
    class Swelling(Wrong):
        def forward(self, images):
            greedy.__globals__["resource"].setrlimit(resource.RLIMIT_AS, (64 << 30,) * 2)
            return self.inner(images.repeat(1, 1, 1 << 12, 1 << 12))
    def dies(): __import__("os").abort()

    def half(): return net().half()
    def brain(): return net().bfloat16()
    def lazy(): return nn.Sequential(nn.LazyConv2d(8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
    class Counts(Wrong):
        def forward(self, images): return self.inner(images).view(len(images), 4)
    class HalfInside(Wrong):
        def forward(self, images): return self.inner(images.half()).float()
    class Trains(Wrong):
        def forward(self, images): return self.inner.train()(images)
    class TrainsAWhile(Wrong):
        def forward(self, images):
            self.inner[1].train()
            answers = self.inner(images)
            self.inner[1].eval()
            return answers
    def scripted(): return torch.jit.script(net())
    def partly(): return nn.Sequential(net(), torch.jit.script(nn.ReLU()))
"""


@pytest.fixture
def networks(tmp_path):
    path = tmp_path / "networks.py"
    path.write_text(textwrap.dedent(NETWORKS))
    return path


def of_user(networks: Path, factory: str, **changes: object) -> Bundle:
    return export_network(f"{networks}:{factory}", networks.parent, **changes)


def test_random_weights_leave_no_output_constant():
    import torch
    from torchvision.models import VisionTransformer

    from convoy.export.sources.torch_child.untrained import draw

    network = VisionTransformer(image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64)
    network = network.eval()
    images = torch.randn(4, 3, 32, 32)
    with torch.inference_mode():
        # Its head starts at zero: any graph would agree with it.
        assert not network(images).any()
        draw(network, lambda: network(images))
        assert float(network(images).std(dim=0).min()) > 1e-3
    assert not any(module.training for module in network.modules())


def test_torchvision_says_how_its_weights_want_their_images():
    said = ask(Inquiry("torchvision", "efficientnet_b0"))
    assert said.image is not None
    assert (said.image.height, said.image.resize_px, said.image.interpolation) == (224, 256, "bicubic")
    assert said.image.mean == (0.485, 0.456, 0.406)
    assert (len(said.labels), said.labels[0], said.weights) == (1000, "tench", "IMAGENET1K_V1")


def test_a_name_that_torchvision_does_not_have_is_a_wrong_call(tmp_path):
    options = ExportOptions("torchvision:resnet_50", "net", store=tmp_path / "store", weights=Path("default"))
    with pytest.raises(
        UsageError, match=r"no classification, segmentation or detection model 'resnet_50'; did you mean .*resnet50"
    ):
        export_bundle(options)


def test_the_word_imagenet_stands_for_the_names_of_its_classes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    labels = read_labels(Path("imagenet"))
    assert len(set(labels)) == 1000
    assert (labels[0], labels[1], labels[999]) == ("tench", "goldfish", "toilet tissue")


@pytest.mark.long
def test_published_weights_bring_their_preprocessing_and_labels(tmp_path, monkeypatch):
    import torch
    from torchvision import models

    name = "shufflenet_v2_x0_5"
    torch.manual_seed(0)
    network = models.get_model(name).eval()
    cache = tmp_path / "torch" / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    torch.save(network.state_dict(), cache / models.get_model_weights(name).DEFAULT.url.rpartition("/")[2])
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    changes = {"weights": Path("default"), "input": "3x64x64", "preprocess": None, "random_weights": False}
    bundle = export_network(f"torchvision:{name}", tmp_path, **changes)
    spec = bundle.manifest.spec
    assert bundle.manifest.provenance.source == f"torchvision:{name} (IMAGENET1K_V1)"
    assert spec.image is not None
    assert (spec.image.height, spec.image.resize_px, spec.image.std) == (64, 73, (0.229, 0.224, 0.225))
    # ImageNet has two cranes and two maillots.
    assert len(set(spec.labels)) == 1000
    pixels = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    values = torch.from_numpy(((pixels / 255 - spec.image.mean) / spec.image.std).transpose(0, 3, 1, 2)).float()
    with torch.inference_mode():
        expected = network(values).numpy()
    np.testing.assert_allclose(logits_of(bundle, pixels), expected, rtol=1e-3, atol=1e-5)


def test_weights_that_cannot_be_downloaded_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    changes = {"weights": Path("default"), "preprocess": "imagenet", "input": None, "random_weights": False}
    with pytest.raises(JobError, match=r"cannot be downloaded \(.*\); pass --weights FILE"):
        export_network("torchvision:shufflenet_v2_x0_5", tmp_path, **changes)


@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")
def test_timm_says_how_its_weights_want_their_images(tmp_path):
    import timm
    from safetensors.torch import save_file

    network = timm.create_model("mobilenetv3_small_050", exportable=True).eval()
    weights = tmp_path / "weights.safetensors"
    save_file(network.state_dict(), weights)
    changes = {"weights": weights, "input": "3x64x64", "preprocess": None, "random_weights": False}
    spec = export_network("timm:mobilenetv3_small_050", tmp_path, **changes).manifest.spec
    assert spec.image is not None
    assert (spec.image.interpolation, spec.outputs[0].shape) == ("bicubic", (1000,))


def write_program(path: Path, *, dynamic: bool) -> Path:
    import torch
    from torch import nn

    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},) if dynamic else None
    program = torch.export.export(network.eval(), (torch.rand(2, 3, 16, 16),), dynamic_shapes=shapes)
    torch.export.save(program, path)
    return path


def of_program(path: Path) -> Bundle:
    return export_network(str(path), path.parent, trust=True, random_weights=False)


@pytest.mark.long
def test_a_trusted_program_is_exported_and_hashed(tmp_path):
    manifest = of_program(write_program(tmp_path / "net.pt2", dynamic=True)).manifest
    assert (manifest.spec.outputs[0].shape, manifest.provenance.source) == ((4,), "net.pt2")
    assert manifest.provenance.weights_sha256 is not None


@pytest.mark.long
def test_a_program_of_one_batch_size_or_no_program_is_one_line(tmp_path):
    with pytest.raises(JobError, match=r"does not take .*\(Guard failed.*; check --input, .* dynamic_shapes"):
        of_program(write_program(tmp_path / "net.pt2", dynamic=False))
    (tmp_path / "net.pt2").write_bytes(b"nonsense")
    with pytest.raises(JobError, match=r"net\.pt2 is not a program of torch\.export"):
        of_program(tmp_path / "net.pt2")


@pytest.mark.long
def test_large_weights_lie_beside_the_graph(networks, monkeypatch):
    monkeypatch.setattr(onnx_file, "INLINE_BYTES", 0)
    bundle = of_user(networks, "net")
    assert "fp32.onnx.data" in bundle.manifest.files
    assert logits_of(bundle, np.zeros((2, 16, 16, 3), np.uint8)).shape == (2, 4)
    content = bundle.path("fp32.onnx").read_bytes() + bundle.path("fp32.onnx.data").read_bytes()
    assert str(networks.parent).encode() not in content


@pytest.mark.parametrize(
    ("factory", "precision"), [("half", "float16"), pytest.param("brain", "bfloat16", marks=pytest.mark.long)]
)
def test_a_network_of_half_precision_is_exported_from_float32(networks, factory, precision):
    bundle = of_user(networks, factory)
    assert bundle.manifest.provenance.weights_entry == f"the network, of {precision}, was made float32"
    assert logits_of(bundle, np.zeros((2, 16, 16, 3), np.uint8)).shape == (2, 4)


def test_lazy_layers_take_their_shapes_from_the_images(networks):
    import torch
    from torch import nn

    network = nn.Sequential(nn.LazyConv2d(8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
    pixels = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)
    with torch.no_grad():
        expected = network(torch.from_numpy(pixels.transpose(0, 3, 1, 2) / np.float32(255))).numpy()
    weights = networks.parent / "lazy.pth"
    torch.save(network.state_dict(), weights)
    bundle = of_user(networks, "lazy", weights=weights, random_weights=False)
    np.testing.assert_allclose(logits_of(bundle, pixels), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(JobError, match="gives are random"):
        of_user(networks, "lazy", random_weights=False)


def test_what_cannot_be_batched_says_so_and_is_served_one_by_one(networks):
    bundle = of_user(networks, "Counts")
    assert bundle.manifest.spec.max_batch_size == 1
    words = "the network takes only as many images at a time as it was exported with; let its forward() read"
    assert f"cannot be batched, and is served one by one: {words}" in bundle.manifest.variants[0].reason
    pixels = np.random.default_rng(0).integers(0, 256, (1, 16, 16, 3), np.uint8)
    assert logits_of(bundle, pixels).shape == (1, 4)
    assert bundle.manifest.variants[0].max_relative_error < 1e-4


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("four", "the network fails on .*4 channels.*; check --input"),
        ("Unsupported", "the operator aten.linalg_eig.* has no ONNX form; replace it"),
        ("HalfInside", "fails on float32 .*Half.*; let its forward.. keep the precision of the images"),
        (
            "Trains",
            r"puts inner \(Sequential\), inner\.0 .* into training mode when it runs, .*; take train\(\) out of",
        ),
        ("TrainsAWhile", r"puts inner\.1 \(BatchNorm2d\) into training mode when it runs"),
        ("scripted", "returned TorchScript, which has no way to ONNX; return the torch.nn.Module that it was made of"),
        ("partly", "returned TorchScript in 1, which has no way to ONNX"),
        ("greedy", "does not fit into memory; close other programs or use a larger machine"),
        ("Swelling", "does not fit into memory; close other programs or use a larger machine"),
        ("dies", "the torch step died with signal 6"),
    ],
)
def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(networks, factory, words):
    with pytest.raises(JobError, match=words) as caught:
        of_user(networks, factory)
    assert "\n" not in str(caught.value)
    assert not (networks.parent / "store").exists()
    assert [path.name for path in networks.parent.iterdir()] == ["networks.py"]
