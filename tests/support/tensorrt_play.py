"""What the fake TensorRT does when a plan is built: one scenario, and the play for each method.

A scenario is the script (what the parser, the builder and the inspector answer) and the record of what was
asked of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.support.fake_tensorrt import RTX, HostMemory, Plays, make_fake, new

# Name, the phase around it, number of steps.
Phase = tuple[str, str | None, int]
CANCELED = "IBuilder::buildSerializedNetwork: Error Code 7: BuildCanceled (Build canceled by user)"


@dataclass(frozen=True)
class FakeInput:
    name: str = "images"
    shape: tuple[int, ...] = (-1, 8, 8, 3)
    is_shape_tensor: bool = False


@dataclass(frozen=True)
class FakeParserError:
    node_name: str
    node_operator: str
    desc: str
    node: int = 7


@dataclass
class Scenario:
    """The script first, what came of it after. `on_step` runs at each step of the build,
    `after_build` once at its end."""

    version: str = "11.4"
    inputs: tuple[FakeInput, ...] = (FakeInput(),)
    parser_errors: tuple[FakeParserError, ...] = ()
    is_parsed: bool = True
    phases: tuple[Phase, ...] = (("Building", None, 2), ("Timing", "Building", 3))
    on_step: Callable[[], None] = lambda: None
    after_build: Callable[[], None] = lambda: None
    build_errors: tuple[str, ...] = ()
    plan: bytes = b"an engine"
    data_types: tuple[str, ...] = ("Half", "Half", "Float")
    is_silent_without_shapes: bool = False
    is_loadable: bool = True
    takes_timing: Callable[[bytes], bool] = lambda known: True

    builds: int = 0
    network_flags: int = -1
    parsed_path: str = ""
    config: Any = None
    pools: dict[str, int] = field(default_factory=dict)
    cleared: set[str] = field(default_factory=set)
    profiles: list[dict[str, tuple[Any, ...]]] = field(default_factory=list)
    timing_in_use: bytes | None = None
    capabilities: list[str] = field(default_factory=list)
    context_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def module(self) -> Any:
        """The fake library that plays this scenario."""
        return make_fake(self.version, _plays(self))


def report(version: str, data_types: tuple[str, ...]) -> str:
    """The inspector's JSON for a chain of convolutions that answer in these types, in the version's words."""
    layers = [_layer(version, index, kind) for index, kind in enumerate(data_types)]
    layers.append(_layer(version, len(layers), data_types[-1]) | {"LayerType": "Reformat"})
    if version.startswith("10"):
        return json.dumps({"Layers": layers, "Bindings": ["images", "logits"]})
    return json.dumps({"Layers": layers, "I/O Tensors": [{"Name": "images", "IOMode": "Input", "DataType": "UInt8"}]})


_FORMATS = {
    "Half": "Channel major FP16 format where channel % 8 == 0",
    "Float": "Row major linear FP32 format",
    "Int8": "Thirty-two wide channel vectorized row major Int8 format",
    "UInt8": "Row major linear UInt8 format",
    "FP8": "Row major linear FP8 format",
    "N/A": "N/A due to dynamic shapes",
}


def _layer(version: str, index: int, kind: str) -> dict[str, Any]:
    if version.startswith("10"):
        tensor: dict[str, Any] = {"Format/Datatype": _FORMATS[kind]}
    else:
        tensor = {"Format": _FORMATS[kind], "DataType": kind}
    tensor |= {"Name": f"t{index}", "Location": "Device", "Dimensions": [1, 8]}
    return {"Name": f"conv{index}", "LayerType": "CaskConvolution", "Inputs": [tensor], "Outputs": [tensor]}


def _plays(s: Scenario) -> Plays:
    plays = _network_plays(s) | _config_plays(s) | _builder_plays(s) | _runtime_plays(s)
    return _rtx_plays(s, plays) if s.version == RTX else plays


def _network_plays(s: Scenario) -> dict[tuple[str, str], Callable[..., Any]]:
    def parse_from_file(parser: Any, model: str) -> bool:
        s.parsed_path = model
        return s.is_parsed and not s.parser_errors

    def of_error(name: str) -> Callable[..., Any]:
        return lambda error: getattr(error.state["script"], name)

    def of_tensor(name: str) -> Callable[..., Any]:
        return lambda tensor: getattr(tensor.state["script"], name)

    return {
        ("OnnxParser", "parse_from_file"): parse_from_file,
        ("OnnxParser", "num_errors"): lambda parser: len(s.parser_errors),
        ("OnnxParser", "get_error"): lambda parser, index: new(
            parser.module, "ParserError", script=s.parser_errors[index]
        ),
        ("OnnxParser", "supports_operator"): lambda parser, op_name: op_name in ("Conv", "Resize"),
        **{("ParserError", name): of_error(name) for name in ("node", "node_name", "node_operator", "desc")},
        ("INetworkDefinition", "num_inputs"): lambda network: len(s.inputs),
        ("INetworkDefinition", "get_input"): lambda network, index: new(
            network.module, "ITensor", script=s.inputs[index]
        ),
        **{("ITensor", name): of_tensor(name) for name in ("name", "shape", "is_shape_tensor")},
    }


def _config_plays(s: Scenario) -> dict[tuple[str, str], Callable[..., Any]]:
    def set_timing_cache(config: Any, cache: Any, ignore_mismatch: bool) -> bool:
        known: bytes = cache.state["known"]
        if not ignore_mismatch and not s.takes_timing(known):
            return False
        s.timing_in_use = known
        return True

    def set_shape(profile: Any, input: str, min: Any, opt: Any, max: Any) -> None:
        profile.state[input] = (min, opt, max)

    return {
        ("IBuilderConfig", "clear_flag"): lambda config, flag: s.cleared.add(flag.name),
        ("IBuilderConfig", "set_memory_pool_limit"): lambda config, pool, pool_size: s.pools.update(
            {pool.name: pool_size}
        ),
        ("IBuilderConfig", "add_optimization_profile"): lambda config, profile: s.profiles.append(profile.state),
        ("IBuilderConfig", "create_timing_cache"): lambda config, serialized_timing_cache: new(
            config.module, "ITimingCache", known=bytes(serialized_timing_cache)
        ),
        ("IBuilderConfig", "set_timing_cache"): set_timing_cache,
        ("IBuilderConfig", "get_timing_cache"): lambda config: new(
            config.module, "ITimingCache", known=(s.timing_in_use or b"") + b"+"
        ),
        ("ITimingCache", "serialize"): lambda cache: HostMemory(cache.state["known"]),
        ("IOptimizationProfile", "set_shape"): set_shape,
    }


def _builder_plays(s: Scenario) -> dict[tuple[str, str], Callable[..., Any]]:
    def construct(builder: Any, logger: Any) -> None:
        builder.state["logger"] = logger

    def create_network(builder: Any, flags: int = 0) -> Any:
        s.network_flags = flags
        return new(builder.module, "INetworkDefinition")

    def create_builder_config(builder: Any) -> Any:
        s.config = new(builder.module, "IBuilderConfig")
        return s.config

    def build(builder: Any, network: Any, config: Any) -> HostMemory | None:
        s.builds += 1
        for text in s.build_errors:
            builder.state["logger"].log(builder.module.ILogger.ERROR, text)
        monitor = config.state.get("progress_monitor")
        goes_on = all(_play_phase(s, monitor, phase) for phase in s.phases if phase[1] is None)
        s.after_build()
        if not goes_on:
            builder.state["logger"].log(builder.module.ILogger.ERROR, CANCELED)
        return HostMemory(s.plan) if goes_on and not s.build_errors else None

    return {
        ("Builder", "__init__"): construct,
        ("Builder", "create_network"): create_network,
        ("Builder", "create_builder_config"): create_builder_config,
        ("Builder", "create_optimization_profile"): lambda builder: new(builder.module, "IOptimizationProfile"),
        ("Builder", "build_serialized_network"): build,
    }


def _play_phase(s: Scenario, monitor: Any, phase: Phase) -> bool:
    """The phases inside this one come after its first step. When told to stop, none goes on, and all that began end."""
    name, _, steps = phase
    inner = [other for other in s.phases if other[1] == name]
    monitor.phase_start(*phase)
    goes_on = True
    for step in range(steps):
        s.on_step()
        goes_on = monitor.step_complete(name, step) and (step > 0 or all(_play_phase(s, monitor, one) for one in inner))
        if not goes_on:
            break
    monitor.phase_finish(name)
    return goes_on


def _runtime_plays(s: Scenario) -> dict[tuple[str, str], Callable[..., Any]]:
    def deserialize(runtime: Any, serialized_engine: Any) -> Any:
        assert bytes(serialized_engine) == s.plan, "only what was just built may be loaded"
        return new(runtime.module, "ICudaEngine") if s.is_loadable else None

    def get_engine_information(inspector: Any, format: Any) -> str:
        assert format.name == "JSON"
        if s.config.state["profiling_verbosity"].name != "DETAILED":
            return json.dumps({"Layers": ["conv0", "conv1"]})
        is_silent = s.is_silent_without_shapes and not s.context_shapes
        return report(s.version, ("N/A",) * 3 if is_silent else s.data_types)

    def set_input_shape(context: Any, name: str, shape: tuple[int, ...]) -> bool:
        s.context_shapes[name] = shape
        return True

    return {
        ("Runtime", "deserialize_cuda_engine"): deserialize,
        ("ICudaEngine", "create_engine_inspector"): lambda engine: new(engine.module, "EngineInspector"),
        ("ICudaEngine", "create_execution_context"): lambda engine, strategy: new(engine.module, "IExecutionContext"),
        ("ICudaEngine", "get_device_memory_size_for_profile_v2"): lambda engine, profile_index: (
            1024 * (profile_index + 1)
        ),
        ("IExecutionContext", "set_input_shape"): set_input_shape,
        ("EngineInspector", "get_engine_information"): get_engine_information,
    }


_NO_OP = "Use Deprecated in TensorRT-RTX 1.2. Timing cache operations are no-ops in TensorRT-RTX. instead."
_TIMING = (
    ("IBuilderConfig", "set_timing_cache"),
    ("IBuilderConfig", "get_timing_cache"),
    ("ITimingCache", "serialize"),
)
_UNSET = "NONE"


def _rtx_plays(s: Scenario, common: Plays) -> Plays:
    """The plays of TensorRT, with those of RTX over them: it is told what to build for, and logs the layers.

    Like the installed library, as `tests/unit/test_rtx_surface.py` shows.
    """

    def create_builder_config(builder: Any) -> Any:
        state = {"num_compute_capabilities": 0, "capabilities": {}, "logger": builder.state["logger"]}
        s.config = new(builder.module, "IBuilderConfig", **state)
        return s.config

    def set_compute_capability(config: Any, compute_capability: Any, index: int) -> bool:
        if compute_capability.name == _UNSET or not 0 <= index < config.num_compute_capabilities:
            config.state["logger"].log(
                config.module.ILogger.ERROR, "IBuilderConfig::setComputeCapability: API Usage Error"
            )
            return False
        config.state["capabilities"][index] = compute_capability
        return True

    def get_compute_capability(config: Any, index: int) -> Any:
        return config.state["capabilities"].get(index, getattr(config.module.ComputeCapability, _UNSET))

    def build(builder: Any, network: Any, config: Any) -> Any:
        levels, log = builder.module.ILogger, builder.state["logger"].log
        asked = [get_compute_capability(config, index).name for index in range(config.num_compute_capabilities)]
        if _UNSET in asked:
            return log(levels.ERROR, "Unexpected exception bad optional access")
        s.capabilities = asked
        plan = common["Builder", "build_serialized_network"](builder, network, config)
        verbosity = config.state.get("profiling_verbosity")
        if plan is not None and verbosity is not None and verbosity.name == "DETAILED":
            log(levels.VERBOSE, layers_message(s.data_types))
        return plan

    return {
        **common,
        **{key: _deprecated(common[key]) for key in _TIMING},
        ("Builder", "create_builder_config"): create_builder_config,
        ("Builder", "build_serialized_network"): build,
        ("IBuilderConfig", "set_compute_capability"): set_compute_capability,
        ("IBuilderConfig", "get_compute_capability"): get_compute_capability,
    }


def _deprecated(play: Any) -> Any:
    def warned(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(_NO_OP, DeprecationWarning, stacklevel=2)
        return play(*args, **kwargs)

    return warned


def layers_message(data_types: tuple[str, ...]) -> str:
    """What is logged of a chain of convolutions that take and give these types."""
    lines = ["Layers:", _logged_layer("__mye399_0_myl0_0", "shape_call", "", "", "")]
    lines.append(
        _logged_layer("__myl_CastTran_myl0_1", "kgen", _tensor("images", "UInt8"), "", _tensor("t0", data_types[0]))
    )
    for index, kind in enumerate(data_types):
        constants = f"{_tensor(f'w{index}', kind)}, {_tensor(f'alpha{index}', 'Float')}"
        name, given, made = f"conv{index}_myl0_{index + 2}", _tensor(f"t{index}", kind), _tensor(f"t{index + 1}", kind)
        lines.append(_logged_layer(name, "correlation", given, constants, made))
    lines.append(_logged_layer(f"__mye4675_myl0_{len(lines)}", "signal", "", "", "", ", EventId: 1"))
    lines += ["", "I/O Tensors:", " Name: images, IOMode: Input, DataType: UInt8, Dimensions: [-1,8,8,3]"]
    return "\n".join([*lines, "", "Engine Metadata:", " Multi-Device: Disabled"])


def _logged_layer(name: str, kind: str, inputs: str, constants: str, outputs: str, event: str = "") -> str:
    sides = {"Inputs": inputs, "Constants": constants, "Outputs": outputs}
    tensors = ", ".join(f"{side}: [{text and ' '}{text}]" for side, text in sides.items())
    metadata = "" if not inputs else "[ONNX Layer: node_conv2d][ONNX Layer: node_relu]"
    return f"Name: {name}, LayerType: {kind}, {tensors}, TacticName: , StreamId: 0{event}, Metadata: {metadata}"


def _tensor(name: str, kind: str) -> str:
    layout = "Dimensions: [-1,16,8,8], Strides: [1024,1,128,16], StrideOrder: [3,0,2,1]"
    return f"{{ Name: {name}, {layout}, Datatype: {kind}, Format: (NHWC) Channel major format }}"
