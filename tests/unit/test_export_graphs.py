"""Graphs that others made: pools, old opsets, capitals, and what the proof sees of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from export_fixtures import SIZE_PX, export, make_quick, save_graph
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from convoy.app.engines.onnx_session import unoptimised_session
from convoy.export.plan import ExportPlan
from convoy.export.rows import Rows, noise_of_both_signs
from convoy.export.sources.onnx_file import portable
from convoy.export.sources.torch_job import Answered, TorchJob, TorchResult
from convoy.models.bundle import Bundle
from convoy.models.errors import JobError
from convoy.models.spec import ImageSpec, TensorSpec

torch = pytest.importorskip("torch")

nn = torch.nn

# By the shape of what they are given.
LAYERS = {
    (3, 15, 14): {
        "average over the end": nn.AvgPool2d(2, 2, 1, ceil_mode=True),
        "average with a divisor alone": nn.AvgPool2d((3, 2), divisor_override=4),
        "largest over the end": nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        "largest with holes": nn.MaxPool2d(3, 2, 1, 2, ceil_mode=True),
        "adaptive largest": nn.AdaptiveMaxPool2d((7, 4)),
        "adaptive largest of one side": nn.AdaptiveMaxPool2d((None, 7)),
        "adaptive average": nn.AdaptiveAvgPool2d(7),
        "of a power": nn.LPPool2d(2, 3, 2, ceil_mode=True),
    },
    (3, 14, 15): {
        "average with a counted end": nn.AvgPool2d(3, 2, 1, ceil_mode=True),
        "average with a bare end": nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
        "average with a divisor": nn.AvgPool2d(3, 2, 1, ceil_mode=True, divisor_override=5),
    },
    (3, 15): {
        "average in one": nn.AvgPool1d(3, 2, ceil_mode=True),
        "adaptive largest in one": nn.AdaptiveMaxPool1d(7),
    },
    (2, 7, 8, 9): {
        "average in three": nn.AvgPool3d(2, 2, 1, ceil_mode=True, divisor_override=3),
        "adaptive largest in three": nn.AdaptiveMaxPool3d(3),
        "adaptive average in three": nn.AdaptiveAvgPool3d(3),
    },
}


class Pools(nn.Module):
    """Each layer behind a convolution of its own: ONNX Runtime has other kernels for what stands behind one."""

    def __init__(self, channels: int, dimensions: int, layers: list[nn.Module]) -> None:
        super().__init__()
        convolution = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
        self.ways = nn.ModuleList(nn.Sequential(convolution(channels, 8, 3, padding=1), one) for one in layers)

    def forward(self, given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(way(given) for way in self.ways)


@pytest.mark.slow
@pytest.mark.parametrize("shape", LAYERS, ids=str)
def test_pools_answer_as_torchs_do(tmp_path, shape):
    from convoy.export.sources.torch_child import graph

    names = tuple(name.replace(" ", "_") for name in LAYERS[shape])
    network = Pools(shape[0], len(shape) - 1, list(LAYERS[shape].values())).eval()
    given = torch.randn(3, *shape)
    job = TorchJob(
        "file",
        *("net", None, "network", None, None),
        uint8_front=False,
        mean=(),
        std=(),
        max_batch=4,
        threads=1,
        inline_bytes=1 << 30,
        inputs=("x",),
    )
    with torch.no_grad():
        expected = [network(one) for one in (given, given.abs(), -given.abs(), given[:1])]
        graph.write_onnx(network, job, (given,), names, tmp_path / "net.onnx")
        for again, exact in zip(network(given), expected[0], strict=True):
            assert torch.equal(again, exact)  # the layers are torch's own again
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    for one, exact in zip((given, given.abs(), -given.abs(), given[:1]), expected, strict=True):
        for name, found, right in zip(names, session.run(names, {"x": one.numpy()}), exact, strict=True):
            assert found.shape == right.shape, name
            np.testing.assert_allclose(found, right.numpy(), atol=2e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("counts", [0, 1])
@pytest.mark.parametrize("kind", ["AveragePool", "MaxPool"])
@pytest.mark.parametrize("kernel", [2, 3])
@pytest.mark.parametrize("sides", [(31, 30), (30, 33), (7, 7)])
def test_a_files_pool_with_a_ceiling_is_written_with_pads_and_answers_alike(kind, kernel, sides, counts):
    own = {"count_include_pad": counts} if kind == "AveragePool" else {}
    node = helper.make_node(
        kind, ["x"], ["y"], kernel_shape=[kernel] * 2, strides=[2, 2], pads=[1] * 4, ceil_mode=1, **own
    )
    before = helper.make_model(
        helper.make_graph(
            [node],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4, *sides])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4, "h", "w"])],
        ),
        opset_imports=[helper.make_opsetid("", 13)],
        ir_version=8,
    )
    after = onnx.ModelProto()
    after.CopyFrom(before)
    portable(after)
    onnx.checker.check_model(after)
    assert not any(one.name == "ceil_mode" for node in after.graph.node for one in node.attribute)
    values = np.random.default_rng(0).standard_normal((2, 4, *sides)).astype(np.float32)
    torch_pool = (
        nn.AvgPool2d(kernel, 2, 1, True, bool(counts))
        if kind == "AveragePool"
        else nn.MaxPool2d(kernel, 2, 1, ceil_mode=True)
    )
    session = onnxruntime.InferenceSession(after.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": values})[0], torch_pool(torch.tensor(values)).numpy(), atol=1e-6)


def product(equation: str) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy"]
    output = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    node = helper.make_node("Einsum", ["x", "y"], ["z"], "product", equation=equation)
    return helper.make_model(helper.make_graph([node], "g", inputs, [output]))


@pytest.mark.parametrize(
    ("equation", "rewritten"),
    [
        ("B I D, B J D -> J I", "a b c, a d c -> d b"),
        ("bBd,bJd->BJ", "abc,adc->bd"),  # a small and a capital letter are two
        ("...Ad,...Bd->...AB", "...ab,...cb->...ac"),
        ("bid,bjd->ij", "bid,bjd->ij"),
        ("bid,Bjd", "bid,Bjd"),  # the order of the result is that of its letters
    ],
)
def test_capitals_are_taken_out_and_the_product_stays(equation, rewritten):
    x, y = np.random.default_rng(0).normal(size=(2, 2, 3, 4)).astype(np.float32)
    before = ReferenceEvaluator(product(equation)).run(None, {"x": x, "y": y})[0]
    model = portable(product(equation))
    assert helper.get_attribute_value(model.graph.node[0].attribute[0]) == rewritten.encode()
    np.testing.assert_array_equal(ReferenceEvaluator(model).run(None, {"x": x, "y": y})[0], before)


def constant(name: str, *shape: int) -> onnx.TensorProto:
    seed = sum(map(ord, name))
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 0.3
    return numpy_helper.from_array(np.abs(values) + 0.1 if name.startswith("variance") else values, name)


def write(path: Path, opset: int) -> Path:
    """A network of this opset, with what is written in each opset otherwise, one after another."""
    node = helper.make_node
    region = {9: [], 10: [], 11: ["roi"], 12: ["roi"]}.get(opset, [""])
    way = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"} if opset > 10 else {}
    clip = {"min": 0.0, "max": 6.0} if opset < 11 else {}
    nodes = [
        node("Conv", ["x", "w1"], ["c1"], pads=[1] * 4),
        node("Add", ["c1", "shift"], ["added"]),
        node("Clip", ["added", *([] if clip else ["low", "high"])], ["clipped"], **clip),
        node("Conv", ["clipped", "w2"], ["c2"], pads=[1] * 4),
        node("Relu", ["c2"], ["r"]),
        node("BatchNormalization", ["r", "scale", "bias", "mean", "variance"], ["normalised"]),
        node("Upsample" if opset < 10 else "Resize", ["normalised", *region, "factors"], ["m"], mode="nearest", **way),
        node("Conv", ["m", "w3"], ["c3"], pads=[1] * 4),
        node("Softmax", ["c3"], ["shares"], axis=1),
        node("Add", ["shares", "c3"], ["both"]),
        node("Conv", ["both", "w4"], ["d"], pads=[1] * 4),
        node("GlobalAveragePool", ["d"], ["g"]),
        node("Flatten", ["g"], ["y"]),
    ]
    numbers = {"low": 0, "high": 6, "factors": [1, 1, 2, 2], "roi": []}
    constants = [
        *(constant("w1", 8, 3, 3, 3), constant("shift", 1, 8, 1, 1), constant("w2", 8, 8, 3, 3)),
        *(constant("w3", 8, 8, 3, 3), constant("w4", 5, 8, 3, 3)),
        *(constant(name, 8) for name in ("scale", "bias", "mean", "variance")),
        *(numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in numbers.items()),
    ]
    read = {name for one in nodes for name in one.input}
    return save_graph(
        path,
        nodes,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 5])],
        [one for one in constants if one.name in read],
        opset=opset,
        ir_version=7,
    )


def exported(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch, **more: object) -> Bundle:
    make_quick(monkeypatch, tmp_path / "cache")
    given = {"preprocess": "unit", "input": "3x16x16", "allow_random_calibration": True, "max_batch": 4}
    return export(tmp_path, source, **(given | more))


def check(bundle: Bundle) -> None:
    """Every file is there, and answers nearly as fp32 does."""
    errors = {one.file: one.max_relative_error for one in bundle.manifest.variants}
    assert {"fp32.onnx", "fp16.onnx", "int8-cpu.onnx", "int8-trt.onnx"} <= set(errors)
    assert errors["fp16.onnx"] < 0.01
    assert max(errors["int8-cpu.onnx"], errors["int8-trt.onnx"]) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("opset", [9, 10, 11, 12, 13])
def test_every_precision_is_made_of_a_file_of_an_old_opset(tmp_path, monkeypatch, opset):
    source = write(tmp_path / "net.onnx", opset)
    check(exported(tmp_path, str(source), monkeypatch, precisions="fp16,int8"))


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "biased"), [(1, True), (2, False), (4, True), (8, False)])
def test_int8_of_a_transposed_convolution_in_groups_is_right(tmp_path, monkeypatch, groups, biased):
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c"], pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("ConvTranspose", ["r", "t", *(["b"] if biased else [])], ["u"], strides=[2, 2], group=groups),
        helper.make_node("GlobalAveragePool", ["u"], ["g"]),
        helper.make_node("Flatten", ["g"], ["y"]),
    ]
    constants = [
        constant("w1", 8, 3, 3, 3),
        constant("t", 8, 8 // groups, 4, 4),
        *([constant("b", 8)] if biased else []),
    ]
    path = save_graph(
        tmp_path / "net.onnx",
        nodes,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 8])],
        constants,
        opset=17,
    )
    check(exported(tmp_path, str(path), monkeypatch, precisions="fp16,int8"))
    rows = np.random.default_rng(0).standard_normal((24, 3, 16, 16)).astype(np.float32)
    np.savez(tmp_path / "rows.npz", x=rows)
    signals = {"preprocess": None, "input": None, "allow_random_calibration": False}
    check(
        exported(
            tmp_path, str(path), monkeypatch, precisions="fp16,int8", calibrate=str(tmp_path / "rows.npz"), **signals
        )
    )


FLOAT, BYTES = TensorProto.FLOAT, TensorProto.UINT8


@pytest.fixture
def quick(monkeypatch) -> None:
    make_quick(monkeypatch)


def proof_write(path: Path, nodes, constants, outputs, given=("images", FLOAT, ["batch", 3, SIZE_PX, SIZE_PX])) -> Path:
    return save_graph(
        path,
        nodes,
        [helper.make_tensor_value_info(*given)],
        [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(np.asarray(values), name) for name, values in constants.items()],
    )


def write_padded(path: Path) -> Path:
    """A pad of zeros before a maximum, which no value of 0..1 tells from any other pad."""
    nodes = [
        helper.make_node("Pad", ["images", "pads", "zero"], ["padded"]),
        helper.make_node("MaxPool", ["padded"], ["largest"], kernel_shape=[2, 2], strides=[1, 1]),
        helper.make_node("Flatten", ["largest"], ["features"]),
    ]
    pads = np.array([0, 0, 0, 0, 0, 0, 1, 1])
    constants = {"pads": pads, "zero": np.float32(0)}
    return proof_write(path, nodes, constants, {"features": ["batch", 3 * SIZE_PX * SIZE_PX]})


WAYS = {
    "as it is": {},
    "of pictures": {"preprocess": "unit", "front": "none", "task": "none"},
    "of tensors": {"calibrate": "data.npz", "precisions": "fp32"},
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("way", WAYS)
def test_a_fault_of_the_runtime_that_no_picture_shows_is_seen(tmp_path, monkeypatch, way):
    """The same file is proved where the optimisation is left out, and refused where it is not."""
    network, changes = write_padded(tmp_path / "net.onnx"), dict(WAYS[way])
    if "calibrate" in changes:
        shown = np.random.default_rng(0).random((80, 3, SIZE_PX, SIZE_PX), np.float32)
        np.savez(tmp_path / "data.npz", images=shown)
        changes["calibrate"] = str(tmp_path / "data.npz")
    bundle = export(tmp_path, network, **changes)
    assert "on noise of both signs" in bundle.manifest.variants[0].reason
    monkeypatch.setattr("convoy.app.engines.onnx_session.WRONG_OPTIMIZERS", ())
    with pytest.raises(JobError, match=r"differs from (the original file|net.onnx in ONNX Runtime) by"):
        export(tmp_path, network, **changes)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("front", ["uint8_nhwc", "float_nchw"])
def test_noise_reaches_both_ends(front):
    image = ImageSpec(16, 12, 3, "exact", 16, "bilinear", True, (0.5,) * 3, (0.5,) * 3, front)
    spec = TensorSpec("images", image.tensor_dtype, image.tensor_shape)
    noise = noise_of_both_signs([spec], image)["images"]
    assert noise.dtype == spec.numpy_dtype
    assert noise.shape[1:] == spec.shape
    assert np.array_equal(noise, noise_of_both_signs([spec], image)["images"])
    low, high = (0, 255) if front == "uint8_nhwc" else (-2, 2)
    assert noise.min() <= low
    assert noise.max() >= high


@pytest.mark.usefixtures("quick")
def test_a_network_that_does_not_run_on_noise_is_proved_on_what_it_runs_on(tmp_path):
    nodes = [helper.make_node("Log", ["images"], ["logs"]), helper.make_node("Flatten", ["logs"], ["features"])]
    network = proof_write(tmp_path / "net.onnx", nodes, {}, {"features": ["batch", 3 * SIZE_PX * SIZE_PX]})
    shown = 0.5 + np.random.default_rng(0).random((80, 3, SIZE_PX, SIZE_PX), np.float32)
    np.savez(tmp_path / "data.npz", images=shown)
    variant = export(tmp_path, network, calibrate=str(tmp_path / "data.npz"), precisions="fp32").manifest.variants[0]
    assert variant.max_relative_error < 1e-6


def write_detector(path: Path, bias: float, unit: float) -> Path:
    """images -> boxes [N, 16, 4] and scores [N, 16, 2], which are sigmoids."""
    weights = np.random.default_rng(4)
    constants = {
        "scale": np.full((1, 3, 1, 1), 1 / 255, np.float32),
        "w": weights.standard_normal((6, 3, 2, 2)).astype(np.float32) * 0.1,
        "b": np.array([0, 0, 0, 0, bias, bias], np.float32),
        "unit": np.float32(unit),
        "box": np.array([0, -1, 4]),
        "score": np.array([0, -1, 2]),
        "sizes": np.array([4, 2]),
    }
    nodes = [
        helper.make_node("Cast", ["images"], ["float"], to=FLOAT),
        helper.make_node("Transpose", ["float"], ["nchw"], perm=[0, 3, 1, 2]),
        helper.make_node("Mul", ["nchw", "scale"], ["scaled"]),
        helper.make_node("Conv", ["scaled", "w", "b"], ["found"], strides=[2, 2], kernel_shape=[2, 2]),
        helper.make_node("Transpose", ["found"], ["last"], perm=[0, 2, 3, 1]),
        helper.make_node("Split", ["last", "sizes"], ["moved", "logits"], axis=3),
        helper.make_node("Reshape", ["moved", "box"], ["rows"]),
        helper.make_node("Mul", ["rows", "unit"], ["boxes"]),
        helper.make_node("Reshape", ["logits", "score"], ["classes"]),
        helper.make_node("Sigmoid", ["classes"], ["scores"]),
    ]
    outputs = {"boxes": ["batch", 16, 4], "scores": ["batch", 16, 2]}
    return proof_write(path, nodes, constants, outputs, ("images", BYTES, ["batch", SIZE_PX, SIZE_PX, 3]))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("task", ["detect", "none"])
@pytest.mark.parametrize(
    ("bias", "off_by", "output", "is_right"),
    [
        # Pictures that show nothing: rounding is as large as the scores.
        (-13.0, 1.8e-7, "scores", True),
        (-13.0, 3e-3, "scores", False),
        (0.0, 1.8e-7, "scores", True),
        (0.0, 3e-3, "scores", False),
        (-13.0, 3.0, "boxes", False),
    ],
)
def test_a_detector_is_judged_alike_whatever_the_pictures_show(
    tmp_path, monkeypatch, task, bias, off_by, output, is_right
):
    """torch is played: its answers are those of the graph, and one output is off by so much."""

    def played(plan: ExportPlan, samples: Rows, folder: Path) -> TorchResult:
        session = unoptimised_session(write_detector(folder / "model.onnx", bias, unit=8.0))

        def answered(rows: Rows) -> Rows:
            boxes, scores = session.run(["boxes", "scores"], dict(rows))
            own = {"boxes": boxes, "scores": scores}
            return {**own, output: own[output] + np.float32(off_by)}

        noise = noise_of_both_signs(plan.inputs, plan.image)
        return TorchResult(folder / "model.onnx", answered(samples), "0.0", noise=Answered(noise, answered(noise)))

    monkeypatch.setattr("convoy.export.command.to_onnx", played)
    (tmp_path / "net.py").write_text("def make():\n    raise NotImplementedError\n")
    size = {"preprocess": "unit", "input": f"3x{SIZE_PX}x{SIZE_PX}"}
    source = f"{tmp_path / 'net.py'}:make"
    if is_right:
        variant = export(tmp_path, source, task=task, **size).manifest.variants[0]
        assert variant.output_errors["scores"] < 1e-5
        return
    with pytest.raises(JobError, match=rf"{output} of the exported graph differs from torch by .*, allowed is 0\.0001"):
        export(tmp_path, source, task=task, **size)


@pytest.mark.usefixtures("quick")
def test_small_numbers_that_are_not_normalised_are_judged_by_their_size(tmp_path, monkeypatch):
    """A regression of hundredths has no scale of its own: a tenth off is wrong."""

    def played(plan: ExportPlan, samples: Rows, folder: Path) -> TorchResult:
        network = write_detector(folder / "model.onnx", -13.0, unit=1e-5)
        session = unoptimised_session(network)
        boxes, scores = session.run(["boxes", "scores"], dict(samples))
        return TorchResult(network, {"boxes": boxes * np.float32(1.1), "scores": scores}, "0.0")

    monkeypatch.setattr("convoy.export.command.to_onnx", played)
    (tmp_path / "net.py").write_text("def make():\n    raise NotImplementedError\n")
    with pytest.raises(JobError, match=r"boxes of the exported graph differs from torch by 0\.091"):
        export(tmp_path, f"{tmp_path / 'net.py'}:make", task="none", preprocess="unit", input="3x8x8")
