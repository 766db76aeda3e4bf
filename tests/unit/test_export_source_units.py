"""ONNX files as sources: what is kept, what is proved, what is refused; and what registries say. No torch."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from export_fixtures import export, make_quick, save_graph
from onnx import TensorProto, helper, numpy_helper

from convoy.app.engines.base import Engine, run_arrays
from convoy.app.engines.onnx_session import new_session
from convoy.app.engines.onnxruntime import OnnxRuntimeCpuEngine
from convoy.app.loading.proving import CanaryCheck
from convoy.export.sources.origin import parse_source
from convoy.export.sources.published_recipes import timm_image
from convoy.models.bundle import Bundle, open_bundle
from convoy.models.errors import BundleError, JobError, UsageError
from tests.support.onnx_models import identity, mean

SIZE_PX, CLASSES = 6, 3
HEADS = {
    "flatten": [helper.make_node("Flatten", ["pooled"], ["flat"])],
    "reshape": [helper.make_node("Reshape", ["pooled", "to_row"], ["flat"])],
    # As torch writes it.
    "reshape_literally": [helper.make_node("Reshape", ["pooled", "to_row"], ["flat"], allowzero=1)],
    # The row is made of all values at once, so that no second row can be told apart.
    "one_row_only": [
        helper.make_node("Reshape", ["pooled", "to_line"], ["line"]),
        helper.make_node("Reshape", ["line", "to_row"], ["flat"]),
    ],
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    make_quick(monkeypatch)


def write_network(
    path: Path,
    *,
    batch: int | str = 1,
    channels: int = 3,
    head: str = "flatten",
    last: str | None = None,
    channels_last: bool = False,
    input_name: str = "x",
    outputs: int = 1,
) -> Path:
    """float32 [batch, channels, 6, 6] -> `y` [batch, 3]: convolution, pooling, linear layer, `last` behind it."""
    generator = np.random.default_rng(7)
    constants = {
        "kernel": generator.standard_normal((8, channels, 3, 3)).astype(np.float32),
        "weight": generator.standard_normal((8, CLASSES)).astype(np.float32),
        "to_row": np.array([1, 8]),
        "to_line": np.array([-1]),
    }
    given = "nchw" if channels_last else input_name
    nodes = [
        *([helper.make_node("Transpose", [input_name], ["nchw"], perm=[0, 3, 1, 2])] if channels_last else []),
        helper.make_node("Conv", [given, "kernel"], ["features"]),
        helper.make_node("Relu", ["features"], ["positive"]),
        helper.make_node("GlobalAveragePool", ["positive"], ["pooled"]),
        *HEADS[head],
        helper.make_node("MatMul", ["flat", "weight"], ["y" if last is None else "logits"]),
        *([] if last is None else [helper.make_node(last, ["logits"], ["y"])]),
        *(helper.make_node("Identity", ["flat"], [f"y{index}"]) for index in range(1, outputs)),
    ]
    size = [SIZE_PX, SIZE_PX, channels] if channels_last else [channels, SIZE_PX, SIZE_PX]
    others = [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, [batch, 8]) for i in range(1, outputs)]
    return save_graph(
        path,
        nodes,
        [helper.make_tensor_value_info(input_name, TensorProto.FLOAT, [batch, *size])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, CLASSES]), *others],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )


def served(bundle: Bundle) -> Engine:
    """An engine of the bundle that has passed its canary."""
    spec, (variant,) = bundle.manifest.spec, bundle.manifest.variants
    form = {"inputs": spec.inputs, "outputs": spec.outputs, "max_batch_size": spec.max_batch_size}
    engine = OnnxRuntimeCpuEngine(bundle.path("fp32.onnx"), **form, precision="fp32", threads=1)
    CanaryCheck.of_variant(bundle.canary(), variant, batched=engine.batched).run(engine)
    return engine


def original(path: Path, images: np.ndarray) -> np.ndarray:
    session = new_session(path)
    name = session.get_inputs()[0].name
    return np.concatenate([session.run(["y"], {name: images[i : i + 1]})[0] for i in range(len(images))])


def reason(bundle: Bundle) -> str:
    return bundle.manifest.variants[0].reason


@pytest.mark.parametrize("head", ["flatten", "reshape", "reshape_literally"])
def test_a_fixed_batch_of_1_becomes_dynamic_where_that_is_right(tmp_path, head):
    network = write_network(tmp_path / "net.onnx", head=head)
    bundle = export(tmp_path, network)
    spec = bundle.manifest.spec
    assert [(t.name, t.dtype, t.shape) for t in spec.inputs] == [("x", "FP32", (3, SIZE_PX, SIZE_PX))]
    assert [(t.name, t.dtype, t.shape) for t in spec.outputs] == [("y", "FP32", (CLASSES,))]
    assert (spec.max_batch_size, spec.image) == (4, None)
    assert "batch of 1 was made dynamic" in reason(bundle)
    images = np.random.default_rng(0).random((4, 3, SIZE_PX, SIZE_PX), np.float32)
    np.testing.assert_allclose(run_arrays(served(bundle), {"x": images})["y"], original(network, images), rtol=1e-4)


def test_what_cannot_be_batched_is_served_as_it_is(tmp_path, capfd):
    bundle = export(tmp_path, write_network(tmp_path / "net.onnx", head="one_row_only"))
    assert bundle.manifest.spec.max_batch_size == 0
    assert bundle.manifest.spec.inputs[0].shape == (1, 3, SIZE_PX, SIZE_PX)
    assert "not batched: " in reason(bundle)
    served(bundle)
    assert capfd.readouterr() == ("", "")
    bundle = export(tmp_path, mean(tmp_path / "a" / "b" / "mean.onnx"))
    assert bundle.manifest.spec.max_batch_size == 0
    assert re.search(r"not batched: row \d of a batch of 2 differs from the row run alone", reason(bundle))


def test_labels_come_from_the_command_line(tmp_path):
    labels = tmp_path / "labels.txt"
    labels.write_text("a\nb\nc\n")
    assert export(tmp_path, write_network(tmp_path / "net.onnx"), labels=labels).manifest.spec.labels == ("a", "b", "c")
    labels.write_text("a\nb\n")
    with pytest.raises(UsageError, match=r"there are 2 labels, but y is \[1, 3\]"):
        export(tmp_path, write_network(tmp_path / "net.onnx"), labels=labels)


@pytest.mark.parametrize(
    ("front", "channels_last", "input_name"),
    [("uint8", False, "x"), ("uint8", True, "images"), ("none", False, "images"), ("none", True, "x")],
)
def test_preprocessing_puts_our_front_before_the_graph(tmp_path, front, channels_last, input_name):
    network = write_network(tmp_path / "net.onnx", channels_last=channels_last, input_name=input_name)
    bundle = export(tmp_path, network, preprocess="imagenet", front=front)
    spec = bundle.manifest.spec
    assert (spec.inputs[0].name, spec.inputs[0].dtype) == ("images", "UINT8" if front == "uint8" else "FP32")
    assert (spec.outputs[0].name, spec.max_batch_size, spec.activation) == ("y", 4, "softmax")
    assert reason(bundle).startswith("equals net.onnx in ONNX Runtime to ")
    assert "torch" not in bundle.manifest.provenance.tools
    pixels = np.random.default_rng(0).integers(0, 256, (3, SIZE_PX, SIZE_PX, 3), dtype=np.uint8)
    values = (pixels / np.float32(255) - np.float32(spec.image.mean)) / np.float32(spec.image.std)
    expected = original(network, values if channels_last else values.transpose(0, 3, 1, 2))
    given = pixels if front == "uint8" else values.transpose(0, 3, 1, 2)
    np.testing.assert_allclose(run_arrays(served(bundle), {"images": given})["y"], expected, rtol=1e-4, atol=1e-5)


def test_grey_images_work_and_four_channels_are_refused(tmp_path):
    bundle = export(tmp_path, write_network(tmp_path / "net.onnx", channels=1), preprocess="unit")
    assert bundle.manifest.spec.image.channels == 1
    with pytest.raises(JobError, match="images have 1 or 3 channels, not 4; leave --preprocess out"):
        export(tmp_path, write_network(tmp_path / "net.onnx", channels=4), preprocess="imagenet")


@pytest.mark.parametrize(
    ("network", "changes", "words"),
    [
        (
            {"batch": 4},
            {"preprocess": "unit"},
            "takes exactly 4 images at a time; export it again with a dynamic batch",
        ),
        ({}, {"preprocess": "imagenet", "input": "3x8x8"}, "takes 3 channels of 6x6, the preprocessing gives 3 of 8x8"),
        ({}, {"preprocess": "unit", "input": "1x6x6"}, "takes 3 channels of 6x6, the preprocessing gives 1 of 6x6"),
        ({}, {"calibrate": "digits"}, "--calibrate needs images, .* pass --preprocess"),
        ({}, {"evaluate": "digits"}, "--evaluate needs images"),
        ({}, {"min_accuracy_percent": 0.0}, "--min-accuracy needs images, .* pass --preprocess"),
        ({}, {"expect_accuracy_percent": 76.1}, "--expect-accuracy needs images"),
        ({}, {"force": True}, "--force needs images"),
        ({}, {"weights_key": "model"}, "net.onnx carries its weights; leave --weights-key out"),
        ({}, {"random_weights": True}, "net.onnx carries its weights; leave --random-weights out"),
        ({}, {"precisions": "int8"}, "--precisions int8 needs real images; pass --preprocess"),
        ({}, {"weights": Path("w.safetensors")}, "net.onnx carries its weights; leave --weights out"),
        ({}, {"weights": Path("w.pth"), "preprocess": "unit"}, "net.onnx carries its weights"),
    ],
)
def test_what_does_not_fit_an_onnx_file_is_one_line(tmp_path, network, changes, words):
    with pytest.raises((JobError, UsageError), match=words) as caught:
        export(tmp_path, write_network(tmp_path / "net.onnx", **network), **changes)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("dtype", "changes", "words"),
    [
        ("BF16", {}, "has BF16 in x, .*; export it with FP32 tensors, or serve the file .* STORE/net/1/model.onnx"),
        ("BYTES", {}, "has strings in x, .*; serve the file as it is, from STORE/net/1/model.onnx"),
        ("BF16", {"preprocess": "unit", "input": "3x6x6"}, "takes x BF16 .*; export it with an FP32 input"),
        (
            "BYTES",
            {"preprocess": "unit", "input": "3x6x6"},
            r"takes strings \(x BYTES .*\), which bundles do not support",
        ),
    ],
)
@pytest.mark.parametrize("batch", ["batch", 1, 4])
def test_what_numpy_cannot_hold_is_one_line(tmp_path, dtype, changes, words, batch):
    network = identity(tmp_path / "net.onnx", dtype=dtype, dims=(batch, 3, 6, 6))
    with pytest.raises(JobError, match=words) as caught:
        export(tmp_path, network, **changes)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("changes", [{}, {"preprocess": "unit"}])
def test_what_is_not_onnx_is_one_line(tmp_path, changes):
    broken = tmp_path / "net.onnx"
    for content in (b"not a protobuf at all", b""):
        broken.write_bytes(content)
        with pytest.raises(JobError, match=r"net\.onnx (cannot be read as ONNX|has no nodes)") as caught:
            export(tmp_path, broken, input="3x6x6" if changes else None, **changes)
        assert "\n" not in str(caught.value)


def with_external_data(path: Path, location: str) -> Path:
    """The network with its weights in another file, whose name is then changed to `location`."""
    model = onnx.load(write_network(path))
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("preprocess", [None, "unit"])
@pytest.mark.parametrize("where", ["../weights.bin", "/weights.bin", "link.bin"])
def test_weights_from_outside_the_folder_are_refused(tmp_path, where, preprocess):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "weights.bin").write_bytes(bytes(1 << 16))
    (folder / "link.bin").symlink_to(tmp_path / "weights.bin")
    network = with_external_data(folder / "net.onnx", where)
    with pytest.raises((JobError, BundleError), match="takes weights from outside its folder"):
        export(tmp_path, network, preprocess=preprocess, input="3x6x6" if preprocess else None)
    assert not (tmp_path / "store").exists()


def test_weights_beside_the_graph_are_read_and_missed(tmp_path):
    network = with_external_data(tmp_path / "net.onnx", "weights.bin")
    served(export(tmp_path, network))
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(JobError, match=r"needs its weights in 'weights\.bin', which is not beside it"):
        export(tmp_path, network)


@pytest.mark.parametrize("preprocess", [None, "unit"])
def test_large_weights_lie_beside_the_graph_and_are_hashed(tmp_path, monkeypatch, preprocess):
    monkeypatch.setattr("convoy.export.sources.onnx_file.INLINE_BYTES", 64)
    bundle = export(tmp_path, write_network(tmp_path / "net.onnx"), preprocess=preprocess)
    assert {"fp32.onnx", "fp32.onnx.data"} <= set(bundle.manifest.files)
    served(bundle)
    data = bundle.path("fp32.onnx.data")
    data.write_bytes(data.read_bytes()[:-1] + b"\x99")
    with pytest.raises(BundleError, match=r"fp32\.onnx\.data: does not match its sha256"):
        open_bundle(bundle.folder)


TIMM = {"input_size": (3, 224, 224), "interpolation": "bicubic", "mean": (0.5, 0.4, 0.3), "std": (0.1, 0.2, 0.3)}


def test_timms_settings_become_our_preprocessing():
    image = timm_image(TIMM | {"crop_pct": 0.95})
    # As timm.data.create_transform has it: floor(224 / 0.95).
    assert (image.height, image.resize_px, image.resize_mode) == (224, 235, "shorter_side")
    assert (image.mean, image.std, image.interpolation, image.antialias) == (TIMM["mean"], TIMM["std"], "bicubic", True)
    assert timm_image(TIMM | {"crop_pct": 1.0, "crop_mode": "squash"}).resize_mode == "exact"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"crop_pct": 0.9, "crop_mode": "squash"}, "crop mode 'squash' at 0.9 is not supported"),
        ({"crop_mode": "border"}, "crop mode 'border'"),
        ({"interpolation": "random"}, "unknown interpolation 'random'"),
        ({"input_size": (3, 224, 192)}, "3x224x192 is not square"),
        ({"input_size": (4, 224, 224)}, "4x224x224 is not square with 1 or 3 channels"),
    ],
)
def test_timms_settings_are_not_guessed_at(changes, words):
    with pytest.raises(JobError, match=words):
        timm_image(TIMM | changes)


def test_a_program_is_read_only_when_it_is_trusted_and_timm_is_asked_for_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs timm, which is not installed; run `pip install timm`"):
        parse_source("timm:resnet50")
    program = tmp_path / "net.pt2"
    program.touch()
    with pytest.raises(UsageError, match=r"carries pickle, which can run any code .* pass --trust"):
        parse_source(str(program))
    assert parse_source(str(program), trust=True).kind == "pt2"
