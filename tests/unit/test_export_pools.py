"""Pools of every kind, exported and held against torch: of both signs, where windows reach beyond the padding."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from convoy.export.sources.onnx_file import portable

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow
nn = torch.nn

LAYERS = {
    "average over the end": (nn.AvgPool2d(2, 2, 1, ceil_mode=True), (3, 31, 30)),
    "average with a counted end": (nn.AvgPool2d(3, 2, 1, ceil_mode=True), (3, 30, 31)),
    "average with a bare end": (nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), (3, 30, 31)),
    "average with a divisor": (nn.AvgPool2d(3, 2, 1, ceil_mode=True, divisor_override=5), (3, 30, 31)),
    "average with a divisor alone": (nn.AvgPool2d((3, 2), divisor_override=4), (3, 31, 30)),
    "average in three": (nn.AvgPool3d(2, 2, 1, ceil_mode=True, divisor_override=3), (2, 7, 8, 9)),
    "average in one": (nn.AvgPool1d(3, 2, ceil_mode=True), (3, 30)),
    "largest over the end": (nn.MaxPool2d(3, 2, 1, ceil_mode=True), (3, 31, 30)),
    "largest with holes": (nn.MaxPool2d(3, 2, 1, 2, ceil_mode=True), (3, 31, 30)),
    "adaptive largest": (nn.AdaptiveMaxPool2d((7, 4)), (3, 31, 30)),
    "adaptive largest of one side": (nn.AdaptiveMaxPool2d((None, 7)), (3, 31, 30)),
    "adaptive largest in one": (nn.AdaptiveMaxPool1d(7), (3, 31)),
    "adaptive largest in three": (nn.AdaptiveMaxPool3d(3), (2, 7, 8, 9)),
    "adaptive average": (nn.AdaptiveAvgPool2d(7), (3, 31, 30)),
    "adaptive average in three": (nn.AdaptiveAvgPool3d(3), (2, 7, 8, 9)),
    "of a power": (nn.LPPool2d(2, 3, 2, ceil_mode=True), (3, 31, 30)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_pool_answers_as_torch_does(tmp_path, kind):
    from convoy.export.sources.torch_child import graph
    from convoy.export.sources.torch_job import TorchJob

    layer, shape = LAYERS[kind]
    # ONNX Runtime has other kernels for what stands behind a convolution.
    convolution = {2: nn.Conv1d, 3: nn.Conv2d, 4: nn.Conv3d}[len(shape)]
    network = nn.Sequential(convolution(shape[0], 8, 3, padding=1), layer).eval()
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
        expected = [network(one).numpy() for one in (given, given.abs(), -given.abs(), given[:1])]
        graph.write_onnx(network, job, (given,), ("y",), tmp_path / "net.onnx")
        assert np.array_equal(network(given).numpy(), expected[0])  # the layers are torch's own again
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    for one, exact in zip((given, given.abs(), -given.abs(), given[:1]), expected, strict=True):
        (found,) = session.run(None, {"x": one.numpy()})
        assert found.shape == exact.shape
        np.testing.assert_allclose(found, exact, atol=2e-5)


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
