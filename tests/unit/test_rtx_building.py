"""Building with TensorRT for RTX as it is installed, and with the fake that plays it: both do the same.

Neither a GPU nor a driver is needed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import tensorrt_rtx

from tests.support import onnx_models
from tests.support.fake_tensorrt import RTX
from tests.support.rtx_builds import Build, collecting
from tests.support.stores import DEMO, ROOT
from tests.support.tensorrt_play import Scenario

real: Any = tensorrt_rtx
WIDTH = 16
GRAPH = DEMO / "fp32.onnx"
Libraries = tuple[Any, Any]


@pytest.fixture
def onnx(tmp_path: Path) -> Path:
    return onnx_models.add_sub(tmp_path / "model.onnx", ("batch", WIDTH))


@pytest.fixture
def both() -> Libraries:
    """The real library, and the fake one that stands for it."""
    return real, Scenario(version=RTX).module()


def _config(trt: Any) -> Any:
    return trt.Builder(collecting(trt)).create_builder_config()


@pytest.mark.parametrize("stops_at", [None, 1, 4])
def test_phases_are_told_in_the_same_order_in_both(onnx: Path, stops_at: int | None) -> None:
    scenario = Scenario(version=RTX, phases=(("outer", None, 3), ("inner", "outer", 2)))
    for trt in (real, scenario.module()):
        built = Build(trt, onnx, stops_at)
        assert (built.plan is None) == (stops_at is not None)
        assert _is_nested(built.told)
        steps = [event for event in built.told if event[0] == "step"]
        assert stops_at is None or len(steps) == stops_at
        assert any("BuildCanceled" in text for text in built.logger.errors()) == (stops_at is not None)


def _is_nested(told: list[tuple[Any, ...]]) -> bool:
    """Whether phases are inside each other, the outermost has no parent, and each one that began also ended."""
    begun: list[str] = []
    for kind, name, *more in told:
        if kind == "start":
            if (more[0] is None) != (not begun) or (begun and more[0] not in begun):
                return False
            begun.append(name)
        elif kind == "finish":
            begun.remove(name)
        elif name not in begun:
            return False
    return not begun and told[0][2] is None


def test_an_exception_in_the_monitor_is_swallowed_and_stops_the_build(
    onnx: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Raising(real.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            real.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None: ...

        def step_complete(self, phase_name: str, step: int) -> bool:
            raise ValueError("told by the test")

        def phase_finish(self, phase_name: str) -> None: ...

    logger = collecting(real)
    builder = real.Builder(logger)
    network = builder.create_network(0)
    parser = real.OnnxParser(network, logger)
    assert parser.parse_from_file(str(onnx_models.identity(onnx, dims=(1, 4))))
    config = builder.create_builder_config()
    config.progress_monitor = Raising()
    assert builder.build_serialized_network(network, config) is None
    assert "told by the test" in capfd.readouterr().err


def test_every_use_of_the_timing_cache_is_deprecated_in_both(both: Libraries) -> None:
    for trt in both:
        config = _config(trt)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            cache = config.create_timing_cache(b"")
            assert config.set_timing_cache(cache, False)
            assert len(bytes(config.get_timing_cache().serialize())) < 1000
        assert {warning.category for warning in warned} == {DeprecationWarning}
        assert len(warned) == 3
        assert all("no-ops in TensorRT-RTX" in str(warning.message) for warning in warned)


# A tensor's fields, and what else a line has, stay as they are: nobody parses them.
TENSOR = r" \{ Name: \S+, Dimensions: \[[-\d,]*\], .*?Datatype: \w+, Format: [^}]+ \}"
TENSORS = rf"\[(?:{TENSOR}(?:,{TENSOR})*)?\]"
LAYER = re.compile(
    rf"Name: .+, LayerType: (\w+), Inputs: {TENSORS}, Constants: {TENSORS}, Outputs: {TENSORS}, "
    r"TacticName: .*, StreamId: \d+(?:, EventId: \d+)?, Metadata: .*"
)


def test_the_layers_of_a_detailed_build_are_logged_once_and_read_the_same_in_both(both: Libraries) -> None:
    for trt in both:
        messages = [text for severity, text in Build(trt, GRAPH).logger.heard if text.startswith("Layers:\n")]
        assert len(messages) == 1
        layers, tensors, _ = messages[0].split("\n\n")
        read = [LAYER.fullmatch(line) for line in layers.splitlines()[1:]]
        assert None not in read
        assert {"correlation", "kgen", "shape_call"} <= {found[1] for found in read if found}
        assert tensors.startswith("I/O Tensors:\n Name: images, IOMode: Input, DataType: UInt8")


def test_layers_are_not_logged_unless_they_are_asked_for(both: Libraries) -> None:
    for trt in both:
        heard = Build(trt, GRAPH, verbosity="LAYER_NAMES_ONLY").logger.heard
        assert not any(text.startswith("Layers:") for _, text in heard)


@pytest.mark.parametrize(
    ("count", "asked", "are_taken"),
    [
        (0, [], True),
        (2, ["SM80", "SM89"], True),
        (2, ["SM120", "SM120"], True),
        (2, ["SM80"], False),
        (1, ["NONE"], False),
        (1, ["SM80", "SM89"], False),
    ],
)
def test_compute_capabilities_are_taken_alike(
    both: Libraries, onnx: Path, count: int, asked: list[str], are_taken: bool
) -> None:
    def configure(trt: Any, config: Any) -> None:
        config.num_compute_capabilities = count
        taken.extend(
            config.set_compute_capability(getattr(trt.ComputeCapability, name), i) for i, name in enumerate(asked)
        )

    for trt in both:
        taken: list[bool] = []
        plan = Build(trt, onnx, configure=configure).plan
        # A capability too many is refused where it is set, one too few when it is built.
        assert (plan is not None and all(taken)) == are_taken


@pytest.mark.parametrize(("names", "reason"), [(["SM75"], "FP32 GEMM is not supported"), (["SM75", "SM89"], "Turing")])
def test_turing_cannot_multiply_matrices_in_fp32(names: list[str], reason: str) -> None:
    def configure(trt: Any, config: Any) -> None:
        config.num_compute_capabilities = len(names)
        for index, name in enumerate(names):
            assert config.set_compute_capability(getattr(trt.ComputeCapability, name), index)

    built = Build(real, GRAPH, configure=configure)
    assert built.plan is None
    assert reason in built.logger.errors()[0]


# In a process of its own: the first logger must outlive everything, or what goes to all of them goes to freed memory.
CHILD = """
import json, tensorrt_rtx
from tests.support.rtx_builds import collecting

loggers = [collecting(tensorrt_rtx) for _ in range(2)]
builders = [tensorrt_rtx.Builder(logger) for logger in loggers]
config = builders[1].create_builder_config()
config.hardware_compatibility_level = tensorrt_rtx.HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY
level = config.hardware_compatibility_level.name
print(json.dumps([level, *([text for _, text in logger.heard] for logger in loggers)]))
"""


def test_hardware_compatibility_is_not_for_rtx_and_what_is_nobodys_goes_to_the_first_logger() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], cwd=ROOT, capture_output=True, text=True, check=True)
    level, first, second = json.loads(done.stdout)
    assert level == "NONE"
    assert "Thread context has not been set! Using global log stream." in first
    assert any("differs from one already registered" in text for text in second)
    assert any("setHardwareCompatibilityLevel() is unsupported" in text for text in second)


def test_each_builder_tells_its_own_logger() -> None:
    loggers = [collecting(real) for _ in range(2)]
    builders = [real.Builder(logger) for logger in loggers]
    for builder, logger in zip(builders, loggers, strict=True):
        others = [other for other in loggers if other is not logger]
        before = [list(other.errors()) for other in others]
        builder.build_serialized_network(builder.create_network(0), builder.create_builder_config())
        assert any("must have at least one output" in text for text in logger.errors())
        assert [other.errors() for other in others] == before


@pytest.mark.parametrize("flag", [0, 1])
def test_a_network_is_strongly_typed_whether_that_is_asked_for_or_not(flag: int) -> None:
    logger = collecting(real)
    network = real.Builder(logger).create_network(flag)
    assert network.get_flag(real.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
