"""The TensorRT builder against the recorded surfaces of 10.16 and 11.4: what it asks for, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from convoy.models.errors import JobError
from convoy.models.plan_cache import find_plan
from convoy.models.plans import BuildOptions
from tests.support.fake_tensorrt import VERSIONS
from tests.support.tensorrt_bench import Bench
from tests.support.tensorrt_play import FakeInput


@pytest.fixture(params=VERSIONS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    return Bench(tmp_path, request.param)


def test_a_plan_is_built_audited_stored_and_found_again(bench: Bench) -> None:
    built = bench.build()
    assert built.data == b"an engine"
    assert built.record.audit.by_precision == {"fp16": 2, "fp32": 1}
    assert built.record.audit.moving == 1
    assert built.record.scratch_bytes == (1024, 2048)
    assert built.record.device_name == "NVIDIA H200"
    assert find_plan(bench.cache, built.record.key) == built
    assert bench.build() == built
    assert bench.scenario.builds == 1
    assert bench.scenario.parsed_path == str(bench.onnx)


def test_the_network_is_strongly_typed_and_fp32_is_really_fp32(bench: Bench) -> None:
    bench.build()
    flags = bench.scenario.module().NetworkDefinitionCreationFlag
    assert bench.scenario.network_flags == 1 << int(flags.STRONGLY_TYPED)
    assert bench.scenario.cleared == {"TF32"}


def test_there_is_one_static_profile_per_batch_size(bench: Bench) -> None:
    bench.scenario.inputs = (FakeInput("images", (-1, 8, 8, 3)), FakeInput("scale", (-1, 1)))
    bench.build()
    assert bench.scenario.profiles == [
        {"images": ((n, 8, 8, 3),) * 3, "scale": ((n, 1),) * 3} for n in bench.options.batch_sizes
    ]


def test_workspace_and_compatibility_reach_tensorrt(bench: Bench) -> None:
    bench.options = BuildOptions("fp16", (1,), 64, "same_compute_capability")
    built = bench.build()
    assert bench.scenario.pools == {"WORKSPACE": 64 << 20}
    assert bench.scenario.config.hardware_compatibility_level.name == "SAME_COMPUTE_CAPABILITY"
    assert built.record.key.target.gpu_name is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (FakeInput(shape=(1, 8, 8, 3)), "first size .* is fixed at 1, where .* batches of 1, 8; "),
        (FakeInput(shape=(-1, -1, 8, 3)), r"has shape \[-1, -1, 8, 3\]; fix all sizes but the first"),
        (FakeInput(shape=()), "is not a batch"),
        (FakeInput(is_shape_tensor=True), "is not a batch"),
    ],
)
def test_an_input_that_cannot_be_batched_is_refused(bench: Bench, given: FakeInput, message: str) -> None:
    bench.scenario.inputs = (given,)
    with pytest.raises(JobError, match=message):
        bench.build()


def test_the_time_limit_stops_the_build_and_keeps_what_was_measured(bench: Bench) -> None:
    bench.limit_s = 3.5
    bench.scenario.on_step = lambda: bench.spend(1.0)
    with pytest.raises(JobError, match=r"the build exceeded 3\.5 s; raise --time-limit-s"):
        bench.build()
    assert bench.plans() == []
    assert list(bench.cache.glob("timing-*.cache"))


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_a_plan_that_is_not_what_its_label_says_is_refused(bench: Bench, precision: str) -> None:
    bench.options = BuildOptions(precision, (1,))  # type: ignore[arg-type]
    bench.scenario.data_types = ("Float",) * 20 + ({"fp16": "Half", "int8": "Int8"}[precision],)
    with pytest.raises(JobError, match=rf"only 1 of 21 computing layers run in {precision}"):
        bench.build()
    assert bench.plans() == []


def test_an_inspector_that_needs_shapes_gets_them(bench: Bench) -> None:
    bench.scenario.is_silent_without_shapes = True
    assert bench.build().record.audit.by_precision == {"fp16": 2, "fp32": 1}
    assert bench.scenario.context_shapes == {"images": (1, 8, 8, 3)}


def test_a_plan_whose_types_nobody_tells_is_refused_unless_it_claims_nothing(bench: Bench) -> None:
    bench.scenario.data_types = ("N/A", "N/A")
    with pytest.raises(JobError, match="fp16 cannot be proved"):
        bench.build()
    bench.options = BuildOptions("fp32", (1,))
    assert bench.build().record.audit.by_precision == {"unknown": 2}


def test_an_engine_that_does_not_load_is_not_stored(bench: Bench) -> None:
    bench.scenario.is_loadable = False
    with pytest.raises(JobError, match="does not load"):
        bench.build()
    assert bench.plans() == []
