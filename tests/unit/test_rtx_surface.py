"""TensorRT for RTX as it is installed: its surface is the recorded one, and its bindings are as strict as the fake's.

Neither a GPU nor a driver is needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorrt_rtx

from tests.support import onnx_models
from tests.support.fake_tensorrt import RTX, RTX_RECORDING, HostMemory
from tests.support.tensorrt_play import Scenario
from tests.support.tensorrt_surface import record


def collecting(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, msg: str) -> None:
            if severity.name == "ERROR":
                self.errors.append(msg)

    logger = Logger()
    _kept.append(logger)
    return logger


# For good: the real library goes on telling the first one that it was given, and does not keep it alive.
_kept: list[Any] = []


def build(trt: Any, onnx: Path) -> Any:
    """The plan of one graph."""
    logger = collecting(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    assert trt.OnnxParser(network, logger).parse_from_file(str(onnx))
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        rest = tuple(tensor.shape)[1:]
        profile.set_shape(tensor.name, (1, *rest), (8, *rest), (8, *rest))
    config.add_optimization_profile(profile)
    return builder.build_serialized_network(network, config)


real: Any = tensorrt_rtx
WIDTH = 16
Libraries = tuple[Any, Any]


@pytest.fixture
def onnx(tmp_path: Path) -> Path:
    return onnx_models.add_sub(tmp_path / "model.onnx", ("batch", WIDTH))


@pytest.fixture
def both() -> Libraries:
    """The real library, and the fake one that stands for it."""
    return real, Scenario(version=RTX).module()


def test_the_installed_library_is_the_recorded_one() -> None:
    recorded, now = json.loads(RTX_RECORDING.read_text()), record(real)
    again = f"python -m tests.support.tensorrt_surface tensorrt_rtx tests/data/{RTX_RECORDING.name}"
    changed = {
        f"{kind}.{name}": (recorded["classes"].get(kind, {}).get(name), now["classes"].get(kind, {}).get(name))
        for kind in recorded["classes"].keys() | now["classes"].keys()
        for name in recorded["classes"].get(kind, {}).keys() | now["classes"].get(kind, {}).keys()
    }
    changed = {name: pair for name, pair in changed.items() if pair[0] != pair[1]}
    assert not changed, (
        f"{now['version']} differs from {recorded['version']}; look at the fakes, and record it: {again}"
    )
    assert now["functions"] == recorded["functions"]


# What the bindings refuse


@pytest.mark.parametrize(
    "wrong",
    [
        lambda trt: trt.Builder(),
        lambda trt: trt.Builder(object()),
        lambda trt: trt.Builder(None),
        lambda trt: trt.INetworkDefinition(),
        lambda trt: trt.IRuntimeCache(),
        lambda trt: _config(trt).clear_flag("TF32"),
        lambda trt: _config(trt).clear_flag(trt.MemoryPoolType.WORKSPACE),
        lambda trt: _config(trt).clear_flag(flag=trt.BuilderFlag.TF32, force=True),
        lambda trt: _config(trt).set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, "1"),
        lambda trt: _subclass_that_forgets(trt)(),
    ],
)
def test_wrong_arguments_are_type_errors_in_both(both: Libraries, wrong: Callable[[Any], object]) -> None:
    for trt in both:
        with pytest.raises(TypeError):
            wrong(trt)


def test_unknown_names_are_attribute_errors_in_both(both: Libraries) -> None:
    for trt in both:
        with pytest.raises(AttributeError):
            _config(trt).max_workspace_size = 1
        with pytest.raises(AttributeError):
            _ = trt.BuilderFlag.FP16


def _config(trt: Any) -> Any:
    return trt.Builder(collecting(trt)).create_builder_config()


def _subclass_that_forgets(trt: Any) -> type:
    class Forgetful(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

    return Forgetful


# Plans in memory


def test_a_plan_is_a_buffer_and_no_sequence_in_both(onnx: Path) -> None:
    plan = build(real, onnx)
    for memory in (plan, HostMemory(bytes(plan))):
        assert memory.nbytes == memoryview(memory).nbytes == len(bytes(memory)) > 0
        assert memory.dtype.name == "INT8"
        assert bool(memory)
        for wrong in (len, iter, lambda one: one[0]):
            with pytest.raises(TypeError):
                wrong(memory)


def test_without_a_driver_no_plan_is_loaded_and_the_log_says_why(onnx: Path) -> None:
    if _has_driver():
        pytest.skip("there is a driver")
    logger = collecting(real)
    assert real.Runtime(logger).deserialize_cuda_engine(bytes(build(real, onnx))) is None
    assert "CUDA driver version is insufficient" in logger.errors[0]


def _has_driver() -> bool:
    return any(Path("/proc/driver").glob("nvidia/version"))
