"""A network and images so small that the whole pipeline runs in a second, without torch.

The network tells red from blue: its two outputs are the means of the red and of the blue channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from convoy.app.engines.measure import Pace
from convoy.app.engines.onnx_session import new_session, session_options
from convoy.export.command import export_bundle
from convoy.export.options import ExportOptions
from convoy.export.rows import Rows
from convoy.export.sources.torch_job import TorchResult
from convoy.models.bundle import Bundle, open_bundle
from convoy.models.spec import ImageSpec

SIZE_PX = 8
IMAGE = ImageSpec(
    height=SIZE_PX,
    width=SIZE_PX,
    channels=3,
    resize_mode="exact",
    resize_px=SIZE_PX,
    interpolation="bilinear",
    antialias=True,
    mean=(0.0, 0.0, 0.0),
    std=(1.0, 1.0, 1.0),
    front="uint8_nhwc",
)


def save_graph(
    path: Path,
    nodes: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    constants: Sequence[Any],
    opset: int = 20,
    ir_version: int = 10,
) -> Path:
    """A network of these parts, in a file."""
    graph = helper.make_graph(nodes, "network", inputs, outputs, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version), path)
    return path


def write_red_or_blue(path: Path, *, outputs: int = 2) -> Path:
    """uint8 [N, 8, 8, 3] -> logits [N, outputs]."""
    pick = np.zeros((outputs, 3, 1, 1), np.float32)
    pick[0, 0] = pick[1, 2] = 1
    constants = {
        "scale": np.full((1, 3, 1, 1), 1 / 255, np.float32),
        "shift": np.zeros((1, 3, 1, 1), np.float32),
        "conv.weight": pick,
        "conv.bias": np.zeros(outputs, np.float32),
        "head.weight": np.eye(outputs, dtype=np.float32),
        "head.bias": np.zeros(outputs, np.float32),
    }
    nodes = [
        helper.make_node("Transpose", ["images"], ["nchw"], "transpose", perm=[0, 3, 1, 2]),
        helper.make_node("Cast", ["nchw"], ["float"], "cast", to=TensorProto.FLOAT),
        helper.make_node("Mul", ["float", "scale"], ["scaled"], "mul"),
        helper.make_node("Add", ["scaled", "shift"], ["normalised"], "add"),
        helper.make_node("Conv", ["normalised", "conv.weight", "conv.bias"], ["features"], "conv"),
        helper.make_node("Relu", ["features"], ["positive"], "relu"),
        helper.make_node("GlobalAveragePool", ["positive"], ["pooled"], "pool"),
        helper.make_node("Flatten", ["pooled"], ["flat"], "flatten"),
        helper.make_node("Gemm", ["flat", "head.weight", "head.bias"], ["logits"], "head"),
    ]
    return save_graph(
        path,
        nodes,
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["batch", SIZE_PX, SIZE_PX, 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", outputs])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )


def make_quick(monkeypatch: pytest.MonkeyPatch, cache: Path | None = None) -> None:
    """Measure little, do without torch, and have nothing built by TensorRT: a builder's words have tests of their own.

    Steps that were taken before are looked for in `cache`, if it is given.
    """
    if cache is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr("convoy.export.sources.to_onnx.run_job", fake_torch)
    pace = Pace(budget_s=0, limit_s=20, warm_up=1, fewest=3, most=3)
    monkeypatch.setattr("convoy.export.profiling.profile.PACE", pace)
    monkeypatch.setattr("convoy.export.profiling.roofline._BUDGET_S", 0)
    monkeypatch.setattr("convoy.export.profiling.roofline._MATRIX", 64)
    monkeypatch.setattr("convoy.export.variants.precision.has_bf16", lambda: False)  # whatever processor this is
    # The search for ranges by entropy goes from bin to bin, and a shorter one finds as good ones here.
    monkeypatch.setattr("convoy.export.variants.calibrate._ENTROPY_BINS", 256)
    monkeypatch.setattr("convoy.export.command.accepted", lambda variants, *_: tuple(variants))


def answers(path: Path, images: np.ndarray) -> np.ndarray:
    """What plain ONNX Runtime says, without the serving engine, of a network of one input; the first output."""
    session = new_session(path, session_options(threads=1))
    result: np.ndarray = session.run(None, {session.get_inputs()[0].name: images})[0]
    return result


def fake_torch(job: object, samples: Rows, folder: Path, *_: object) -> TorchResult:
    """Stands in for the torch child."""
    path = write_red_or_blue(folder / "model.onnx")
    return TorchResult(path, {"logits": answers(path, samples["images"])}, "0.0")


def write_images(root: Path, *, per_class: int = 12) -> Path:
    """A folder with calibration and test images of the classes blue and red, no two alike."""
    generator = np.random.default_rng(0)
    for part in ("train", "calibration", "test"):
        for label, channel in (("blue", 2), ("red", 0)):
            folder = root / part / label
            folder.mkdir(parents=True)
            for index in range(per_class):
                pixels = generator.integers(0, 100, (SIZE_PX, SIZE_PX, 3), dtype=np.uint8)
                pixels[..., channel] += 150
                Image.fromarray(pixels).save(folder / f"{index}.png")
    return root


def export(tmp_path: Path, source: Path | str, **changes: object) -> Bundle:
    """The bundle of this source, called `net` unless `changes` say otherwise."""
    given = {"source": str(source), "name": "net", "store": tmp_path / "store", "max_batch": 4} | changes
    return open_bundle(export_bundle(ExportOptions(**given)))  # type: ignore[arg-type]


def options(tmp_path: Path, **changes: object) -> ExportOptions:
    """A call that succeeds with `fake_torch`; data and labels lie in `tmp_path`."""
    network = tmp_path / "net.py"
    network.write_text("def make():\n    raise NotImplementedError\n")
    labels = tmp_path / "labels.txt"
    labels.write_text("red\nblue\n")
    given = {
        "source": f"{network}:make",
        "name": "colours",
        "store": tmp_path / "store",
        "labels": labels,
        "preprocess": "unit",
        "input": f"3x{SIZE_PX}x{SIZE_PX}",
        "max_batch": 4,
    }
    return ExportOptions(**(given | changes))  # type: ignore[arg-type]
