"""The networks of the proof: as ONNX files, as torch modules, and the pictures that they are asked about.

ResNet-50 and MobileNetV2 are torchvision's architectures, exported by the house's own exporter. Published weights
cannot be had on a machine without a network, so theirs are drawn at random, with BatchNorm statistics that belong to
them (`torch_child.random_weights`). The digits CNN is the demo, which is trained.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from convoy.app.engines.cpu import cpu_budget
from convoy.export.rows import Chunk
from convoy.export.sources.to_onnx import INLINE_BYTES
from convoy.export.sources.torch_job import INPUT_NAME, LOGITS, TorchJob
from convoy.export.variants.calibrate import Calibration, Conversion, collect
from convoy.export.variants.onnx_graph import prepare
from convoy.export.variants.precision import RECIPES, REFERENCE
from convoy.export.zoo_table.proof import random_picture
from convoy.models import zoo
from convoy.models.bundle import Precision, open_bundle
from convoy.models.images import preprocess
from convoy.models.spec import ImageSpec, ModelSpec, TensorSpec
from tests.gpu.proof.targets import DIGITS

ROOT = Path(__file__).resolve().parents[3]
MOBILENET = "mobilenet_v2"
DEMO_STORE = ROOT / "models" / "demo"
LARGEST = 128
_CLASSES = 1000
_BRANCH_SCALE = 0.25
_PICTURES, _STATISTICS_PICTURES, _CALIBRATION_PICTURES = 256, 32, 8
_IMAGENET = ImageSpec(
    height=224,
    width=224,
    channels=3,
    resize_mode="shorter_side",
    resize_px=232,
    interpolation="bilinear",
    antialias=True,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    front="uint8_nhwc",
)


class NotMade(Exception):
    """The network cannot be had here; the message says why."""


@dataclass(frozen=True, slots=True)
class Subject:
    """One network. `files` are its ONNX graphs; `random` and `real` are uint8 [n, H, W, C].

    `make_network` gives the torch module behind the graphs, float32 [N, C, H, W] normalised -> logits, on the CPU.
    """

    name: str
    spec: ModelSpec
    files: Mapping[Precision, Path]
    random: np.ndarray
    real: np.ndarray
    make_network: Callable[[], Any]

    @property
    def sample_bytes(self) -> int:
        return int(self.random[0].nbytes)


# Makes one network in a folder of its own; with graphs of eight bits for TensorRT where they are asked for.
MakeSubject = Callable[[Path, bool], Subject]


def make_digits(folder: Path, with_int8: bool) -> Subject:
    """The demo bundle's own files. Raises BundleError where it is broken."""
    bundle = open_bundle(DEMO_STORE / DIGITS / "1")
    image = bundle.manifest.spec.image
    assert image is not None
    files = {variant.precision: bundle.path(variant.file) for variant in bundle.manifest.variants if variant.serve}
    return Subject(
        DIGITS,
        bundle.manifest.spec,
        {precision: files[precision] for precision in _wanted(with_int8) if precision in files},
        _random_pictures(image),
        real_pictures(image),
        lambda: _digits_network(files["fp32"]),
    )


def _digits_network(onnx_file: Path) -> Any:
    """The trained network, read back from its graph: the exporter keeps the parameters' names."""
    import onnx
    import torch

    prefix = "network."
    constants = {one.name: onnx.numpy_helper.to_array(one) for one in onnx.load(onnx_file).graph.initializer}
    weights = {name.removeprefix(prefix): value for name, value in constants.items() if name.startswith(prefix)}
    network = zoo.create("simple_cnn", len(weights["classifier.bias"]))
    network.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
    return network.eval()


def torchvision_maker(name: str) -> MakeSubject:
    """How a network of torchvision's is made."""

    def make(folder: Path, with_int8: bool) -> Subject:
        """Raises NotMade without torch and torchvision, JobError where an export fails."""
        try:
            return _make_torchvision(name, folder, with_int8)
        except ImportError as error:
            raise NotMade(f"exporting it needs torch, torchvision, onnx and onnxscript ({error})") from error

    return make


def _make_torchvision(name: str, folder: Path, with_int8: bool) -> Subject:
    import torch

    from convoy.export.sources.torch_child import graph, networks, random_weights

    job = _job(name)
    torch.manual_seed(0)
    network = networks.build(job).eval()
    _calm_residual_branches(network)
    pictures = _random_pictures(_IMAGENET)
    samples = torch.from_numpy(pictures[:_STATISTICS_PICTURES])
    random_weights.draw(network, lambda: network(*graph.normalised([samples], job)))
    graph.write_onnx(network, job, [samples], [LOGITS], folder / REFERENCE.file)
    files = _variants(folder, pictures[:_CALIBRATION_PICTURES], with_int8)
    inputs = (TensorSpec(INPUT_NAME, _IMAGENET.tensor_dtype, _IMAGENET.tensor_shape),)
    outputs = (TensorSpec(LOGITS, "FP32", (_CLASSES,)),)
    spec = ModelSpec(name, inputs, outputs, LARGEST, _IMAGENET, "softmax", ())
    return Subject(name, spec, files, pictures, real_pictures(_IMAGENET), lambda: network)


def _calm_residual_branches(network: Any) -> None:
    """Let each branch weigh a quarter of what it is added to, about as training leaves them.

    With branches as strong as their skips, rounding grows from block to block, and an error would tell of chance.
    """
    for block in network.modules():
        is_inverted = getattr(block, "use_res_connect", False)
        last = block.conv[-1] if is_inverted else getattr(block, "bn3", None)
        if last is not None:
            last.weight.data.fill_(_BRANCH_SCALE)


def _job(name: str) -> TorchJob:
    return TorchJob(
        kind="torchvision",
        name=name,
        file=None,
        weights_from="random",
        weights=None,
        classes=None,
        uint8_front=True,
        mean=_IMAGENET.mean,
        std=_IMAGENET.std,
        max_batch=LARGEST,
        threads=cpu_budget(),
        inline_bytes=INLINE_BYTES,
    )


def _variants(folder: Path, pictures: np.ndarray, with_int8: bool) -> dict[Precision, Path]:
    """The other precisions, beside the fp32 graph, by the recipes of export and with min-max ranges."""
    prepared = prepare(folder / REFERENCE.file, folder / "prepared.onnx")
    chunks = (
        Chunk({"images": pictures[start : start + 4]}, None, np.arange(start, start + 4))
        for start in range(0, len(pictures), 4)
    )
    calibration = Calibration(prepared, collect(prepared, chunks, ["minmax"]))
    files: dict[Precision, Path] = {"fp32": folder / REFERENCE.file}
    for recipe in RECIPES:
        if recipe.make is not None and recipe.target != "cpu" and recipe.precision in _wanted(with_int8):
            recipe.make(Conversion(calibration), folder / recipe.file)
            files[recipe.precision] = folder / recipe.file
    return files


def _wanted(with_int8: bool) -> tuple[Precision, ...]:
    return ("fp32", "fp16", "int8", "fp8") if with_int8 else ("fp32", "fp16")


def _random_pictures(image: ImageSpec) -> np.ndarray:
    return np.stack([random_picture(image, seed) for seed in range(_PICTURES)])


def real_pictures(image: ImageSpec) -> np.ndarray:
    """Every picture that this repository has, as the model takes it: uint8 [n, H, W, C]."""
    files = [*sorted((ROOT / "loadtest" / "data").glob("*.png")), *sorted((ROOT / "tests" / "data").glob("*.png"))]
    whole = [preprocess(file.read_bytes(), image) for file in files]
    return np.stack([*whole, *(preprocess(crop, image) for crop in _crops(ROOT / "docs" / "page.png"))])


def _crops(page: Path) -> Iterator[bytes]:
    """Pieces of a screenshot, each a picture of its own."""
    with Image.open(page) as opened:
        screenshot = opened.convert("RGB")
    side = min(screenshot.size) // 3
    for left in range(0, screenshot.width - side + 1, side):
        for top in range(0, screenshot.height - side + 1, side):
            file = io.BytesIO()
            screenshot.crop((left, top, left + side, top + side)).save(file, "PNG")
            yield file.getvalue()
