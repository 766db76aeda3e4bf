"""The fake TensorRT refuses what the recorded version does not have; without this it would prove nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_tensorrt import RTX, VERSIONS, make_fake, parse_signature
from tests.support.tensorrt_play import Scenario


@pytest.fixture(params=(*VERSIONS, RTX))
def trt(request: pytest.FixtureRequest) -> Any:
    return Scenario(version=request.param).module()


def logger_of(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

    return Logger()


def config_of(trt: Any) -> Any:
    return trt.Builder(logger_of(trt)).create_builder_config()


def test_what_11_removed_is_there_in_10_only() -> None:
    old, new = (Scenario(version=version).module() for version in VERSIONS)
    assert hasattr(old.BuilderFlag, "FP16")
    assert not hasattr(new.BuilderFlag, "FP16")
    assert hasattr(old.NetworkDefinitionCreationFlag, "EXPLICIT_BATCH")
    assert not hasattr(new.NetworkDefinitionCreationFlag, "EXPLICIT_BATCH")
    assert not hasattr(new.IBuilderConfig, "int8_calibrator")


def test_only_rtx_can_be_told_what_to_build_for() -> None:
    trt = Scenario(version=RTX).module()
    assert trt.__name__ == "tensorrt_rtx"
    assert hasattr(trt.IBuilderConfig, "set_compute_capability")
    assert not any(hasattr(Scenario(version=version).module(), "ComputeCapability") for version in VERSIONS)


def test_unknown_names_raise(trt: Any) -> None:
    config = config_of(trt)
    with pytest.raises(AttributeError):
        _ = trt.IInt8Calibrator
    with pytest.raises(AttributeError):
        config.max_workspace_size = 1
    with pytest.raises(AttributeError):
        config.build_engine()


def test_wrong_arguments_raise(trt: Any) -> None:
    config = config_of(trt)
    for wrong in (
        lambda: config.set_flag(),
        lambda: config.clear_flag(flag=trt.BuilderFlag.TF32, force=True),
        lambda: config.clear_flag(trt.MemoryPoolType.WORKSPACE),
        lambda: config.clear_flag("TF32"),
        lambda: config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, "1"),
        lambda: trt.Builder(),
        lambda: trt.Builder(object()),
        lambda: trt.INetworkDefinition(),
    ):
        with pytest.raises(TypeError):
            wrong()


def test_a_subclass_must_call_the_bound_constructor(trt: Any) -> None:
    class Forgetful(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

    with pytest.raises(TypeError, match="must be called when overriding __init__"):
        Forgetful()


def test_what_is_recorded_but_not_played_raises(trt: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"IBuilderConfig\.reset"):
        config_of(trt).reset()


def test_a_play_for_a_name_that_does_not_exist_is_refused() -> None:
    with pytest.raises(AssertionError, match="not in TensorRT"):
        make_fake("11.4", {("Builder", "build_engine"): lambda builder: None})


def test_signatures_with_defaults_and_brackets_are_read() -> None:
    text = "f(self: X, a: dict[str, int], b: A.B = <A.B: 0>, c: str = None) -> tuple[bool, int]"
    parsed = parse_signature(text)
    assert [(p.name, p.annotation, p.default is p.empty) for p in parsed] == [
        ("self", "X", True),
        ("a", "dict[str, int]", True),
        ("b", "A.B", False),
        ("c", "str", False),
    ]
