"""Export as a user meets it: real torch, real digits, and the bundle that ships with Convoy."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from rich.console import Console

from convoy.app.engines.cpu import has_int8_dot_product
from convoy.export.command import run
from convoy.export.options import ExportOptions
from convoy.models.bundle import open_bundle
from convoy.models.datasets import load
from convoy.models.errors import JobError
from convoy.models.samples import decode
from tests.support.quick_exports import export_network, logits_of, write_digits_checkpoint
from tests.support.stores import DEMO, ROOT

USERS_REPOSITORY = {
    "models/__init__.py": "",
    "models/blocks.py": """
        from torch import nn
        def block(i, o): return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())
    """,
    "app/settings.py": "CLASSES = 5\n",
    "export.py": "WIDTH = 8\n",
    "net.py": """
        from app.settings import CLASSES
        from export import WIDTH
        from models.blocks import block
        from torch import nn
        print("chatter that nobody wants")
        def make():
            return nn.Sequential(block(3, WIDTH), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, CLASSES))
        def fails():
            raise RuntimeError("no luck")
        def returns_a_number():
            return 3
        class Mixing(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = make()
            def forward(self, images):
                logits = self.inner(images)
                return logits - logits.mean(0, keepdim=True)
        class Branching(Mixing):
            def forward(self, images):
                return self.inner(images) if images.sum() > 0 else self.inner(-images)
    """,
    "models/relative.py": """
        from .blocks import block
        from torch import nn
        def make():
            return nn.Sequential(block(3, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    """,
    "loose/net.py": "from .blocks import block\n",
    "broken.py": "import a_package_that_nobody_has\n",
}


def test_the_bundled_digits_are_as_good_as_their_manifest_says():
    bundle = open_bundle(DEMO)
    spec = bundle.manifest.spec
    assert spec.image is not None
    test = decode(load("digits").in_order_of(spec.labels).part("test"), spec.image)
    fp32 = bundle.manifest.variants[0]
    for variant in bundle.manifest.variants:
        assert variant.accuracy is not None
        top1 = float((logits_of(bundle, test.images, variant.file).argmax(axis=1) == test.labels).mean())
        # Another CPU rounds INT8 differently, so an image on the edge may fall to the other side.
        if variant.file != "int8-cpu.onnx" or has_int8_dot_product():  # else sums overflow, and its canary refuses it
            assert top1 == pytest.approx(variant.accuracy.top1, abs=0.006)
        assert variant.accuracy.top1 >= 0.98
        assert variant.accuracy.loss_points <= 1.0
    assert fp32.serve


def test_the_bundled_digits_are_small_and_give_away_nothing():
    assert sum(path.stat().st_size for path in DEMO.iterdir()) < 1 << 20
    for path in DEMO.iterdir():
        content = path.read_bytes()
        assert not any(folder in content for folder in (b"/tmp/", b"/home/", b"/root/", b"/work/"))


def test_export_itself_does_not_import_torch():
    code = "import sys, convoy.export.command; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.slow
def test_from_a_checkpoint_to_a_verified_bundle(tmp_path, measures_little):
    checkpoint = write_digits_checkpoint(tmp_path / "digits.safetensors")
    console = Console(file=io.StringIO(), width=200)
    options = ExportOptions(
        "zoo:simple_cnn", "digits", store=tmp_path / "store", weights=checkpoint, calibrate="digits", evaluate="digits"
    )
    bundle = open_bundle(run(options, console))
    files = ("fp32.onnx", "fp16.onnx", "int8-cpu.onnx", "int8-trt.onnx", "fp8.onnx")
    fp32, fp16, int8, int8_trt, fp8 = (bundle.manifest.variant(file) for file in files)
    assert all(variant.serve for variant in (fp32, fp16, int8_trt, fp8))
    assert fp32.max_relative_error < 1e-4
    for variant in (fp32, int8, fp8):
        assert variant.accuracy is not None
        assert (variant.accuracy.top1 >= 0.98, variant.accuracy.loss_points <= 1.0) == (True, True), variant
    assert fp8.audit is not None
    assert (fp8.calibration_method, fp8.audit.by_precision["fp8"]) == ("minmax", 1)
    assert fp32.latency is not None
    assert [point.batch_size for point in fp32.latency.points] == [1, 2, 4, 8, 16, 32, 64]
    assert "int8-cpu.onnx" in console.file.getvalue()


@pytest.fixture
def repository(tmp_path):
    for name, text in USERS_REPOSITORY.items():
        path = tmp_path / "repository" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = text.splitlines()
        path.write_text("\n".join(line.removeprefix("        ") for line in lines) + "\n")
    return tmp_path / "repository"


@pytest.mark.slow
@pytest.mark.parametrize("front", [pytest.param("uint8", marks=pytest.mark.long), "none"])
@pytest.mark.parametrize("file", ["net.py", "models/relative.py"])
def test_a_users_repository_may_have_packages_of_our_names(repository, measures_little, file, front, capfd):
    bundle = export_network(f"{repository}/{file}:make", repository.parent, front=front)
    assert bundle.manifest.spec.outputs[0].shape == (5,)
    assert bundle.manifest.spec.inputs[0].shape == ((16, 16, 3) if front == "uint8" else (3, 16, 16))
    assert capfd.readouterr() == ("", "")
    assert not list(repository.rglob("__pycache__"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("broken.py:make", "broken.py cannot be imported: ModuleNotFoundError: .*a_package_that_nobody_has.* (line 1)"),
        ("loose/net.py:make", "attempted relative import .* (line 1); add an __init__.py to its folder"),
        ("net.py:nothing", "net.py has no function 'nothing'; it has "),
        ("net.py:fails", "net.py:fails failed: RuntimeError: no luck (line 10)"),
        ("net.py:returns_a_number", "returned a int; it must return a torch.nn.Module"),
        ("net.py:Mixing", "differs from torch by .* mix samples"),
        ("net.py:Branching", "torch cannot export this network to ONNX: .*control flow that depends on the data"),
    ],
)
def test_what_is_wrong_with_a_users_network_is_one_line(repository, measures_little, forks_torch, source, words):
    with pytest.raises(JobError, match=words.replace("(", r"\(").replace(")", r"\)")) as caught:
        export_network(f"{repository}/{source}", repository.parent)
    assert "\n" not in str(caught.value)
    assert not (repository.parent / "store").exists()
