"""torch networks with dicts, tuples, several inputs and maps, all the way to a bundle; torchvision's beside them."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from convoy.models.bundle import Bundle
from convoy.models.errors import JobError
from tests.support.quick_exports import export_network

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("measures_little", "forks_torch")]

NETWORKS = """
    from collections import namedtuple
    import torch
    from torch import nn

    class Segmenter(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            self.head, self.aux = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)
        def forward(self, images):
            features = self.body(images)
            return {"out": self.head(features), "aux": self.aux(features), "none": None}

    class Signals(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.table = nn.Conv1d(2, 8, 5, padding=2), nn.Embedding(4, 8)
            self.classes, self.size = nn.Linear(8, 3), nn.Linear(8, 1)
        def forward(self, signal, kind):
            features = torch.relu(self.conv(signal)).mean(2) + self.table(kind)
            return Found(self.classes(features), [self.size(features), self.classes(features).argmax(1)])

    class One(Signals):
        def forward(self, x):
            return self.classes(torch.relu(self.conv(x)).mean(2))

    class Pictures(Segmenter):
        def forward(self, images):
            return [{"boxes": one.flatten()} for one in self.body(images)]

    class Total(Segmenter):
        def forward(self, images):
            return {"out": self.body(images), "total": self.body(images).sum()}

    class Single(Segmenter):
        def forward(self, images):
            return self.body(images).mean((2, 3)).reshape(1, 8)

    class Words(Segmenter):
        def forward(self, images):
            return {"out": self.body(images), "name": "net"}

    Found = namedtuple("Found", "classes others")
    torch.manual_seed(1)
    segmenter, signals, one, pictures, total, words = Segmenter, Signals, One, Pictures, Total, Words
    single = Single
"""


NO_IMAGES = {"preprocess": None, "input": None}


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "net.py").write_text(textwrap.dedent(NETWORKS))
    return tmp_path / "net.py"


def export(file: Path, factory: str, **changes: object) -> Bundle:
    return export_network(f"{file}:{factory}", file.parent, **changes)


@pytest.mark.long
def test_a_dict_of_maps_in_all_precisions(tmp_path, file):
    bundle = export(file, "segmenter", task="segment", allow_random_calibration=True, precisions="fp16,int8,bf16")
    spec = bundle.manifest.spec
    assert [(one.name, one.shape) for one in spec.outputs] == [("out", (4, 16, 16)), ("aux", (4, 16, 16))]
    assert spec.segmentation is not None
    assert (spec.task, spec.segmentation.class_map, spec.activation) == ("segment", "out", "softmax")
    assert {variant.precision for variant in bundle.manifest.variants} == {"fp32", "fp16", "int8", "bf16"}
    for variant in bundle.manifest.variants:
        assert set(variant.output_errors) == {"out", "aux"}
        assert max(variant.output_errors.values()) < 0.1
        assert (variant.agreement or 0) > 0.9


@pytest.mark.long
def test_several_inputs_by_the_names_of_forward(tmp_path, file):
    generator = np.random.default_rng(0)
    np.savez(
        tmp_path / "data.npz",
        kind=generator.integers(0, 4, 40),
        signal=generator.standard_normal((40, 2, 32)).astype(np.float32),
    )
    bundle = export(file, "signals", **NO_IMAGES, calibrate=str(tmp_path / "data.npz"), precisions="int8")
    spec = bundle.manifest.spec
    assert {one.name: (one.dtype, one.shape) for one in spec.inputs} == {
        "kind": ("INT64", ()),
        "signal": ("FP32", (2, 32)),
    }
    assert [one.name for one in spec.outputs] == ["classes", "others.0", "others.1"]
    assert spec.outputs[2].dtype == "INT64"
    np.savez(tmp_path / "odd.npz", sort=np.zeros(4, np.int64), signal=np.zeros((4, 2, 32), np.float32))
    with pytest.raises(
        JobError, match=r"forward\(\) takes signal, kind, and the inputs are sort, signal; rename the inputs"
    ):
        export(file, "signals", **NO_IMAGES, calibrate=str(tmp_path / "odd.npz"), precisions="fp32")


@pytest.mark.long
def test_a_signal_by_its_shape_alone_and_with_targets(tmp_path, file):
    bundle = export(file, "one", preprocess=None, input="2x32")
    (given,), spec = bundle.manifest.spec.inputs, bundle.manifest.spec
    assert (given.name, given.dtype, given.shape, spec.task) == ("input", "FP32", (2, 32), "none")
    generator = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x=generator.standard_normal((80, 2, 32)), labels=generator.integers(0, 3, 80))
    data = str(tmp_path / "d.npz")
    bundle = export(file, "one", **NO_IMAGES, calibrate=data, evaluate=data, task="classify", precisions="fp16")
    accuracy = bundle.manifest.variant("fp16.onnx").accuracy
    assert accuracy is not None
    assert (accuracy.metric, bundle.manifest.spec.activation) == ("top-1", "softmax")


@pytest.mark.parametrize(
    ("factory", "words", "outputs"),
    [
        ("pictures", "returns a dict for each sample, so that it cannot be batched; return", {"boxes": (2048,)}),
        ("total", "returns total [] for 3 samples, so that it cannot be batched", {"out": (8, 16, 16), "total": ()}),
    ],
)
def test_what_cannot_be_batched_says_so_and_is_served_one_by_one(tmp_path, file, factory, words, outputs):
    bundle = export(file, factory)
    spec, (fp32, *_) = bundle.manifest.spec, bundle.manifest.variants
    assert (spec.max_batch_size, {one.name: one.shape for one in spec.outputs}) == (1, outputs)
    assert f"cannot be batched, and is served one by one: the network {words}" in fp32.reason
    assert fp32.max_relative_error < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("factory", ["total", "single"])
def test_what_cannot_be_batched_is_calibrated_and_judged_one_by_one(tmp_path, file, factory):
    """On more pictures than one, whose places in a batch the graph has none of."""
    generator = np.random.default_rng(0)
    for number in range(40):
        pixels = generator.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        (tmp_path / "flat").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "flat" / f"{number}.png")
    data = str(tmp_path / "flat")
    bundle = export(file, factory, calibrate=data, evaluate=data, precisions="fp16,int8", force=True)
    assert bundle.manifest.spec.max_batch_size == 1
    files = {one.file: one for one in bundle.manifest.variants}
    assert {"fp32.onnx", "fp16.onnx", "int8-cpu.onnx"} <= files.keys()
    assert "equals torch to" in files["fp32.onnx"].reason
    assert all(one.agreement is not None and one.agreement > 0.5 for one in files.values())


def test_what_returns_other_than_tensors_says_so(tmp_path, file):
    with pytest.raises(JobError, match="returns a str in 'name'; it must return tensors"):
        export(file, "words")
    assert not (tmp_path / "store").exists()


def test_weights_of_a_dict_are_known_to_be_random(tmp_path, file):
    with pytest.raises(JobError, match=r"the weights that net.py:segmenter gives are random"):
        export(file, "segmenter", random_weights=False)
