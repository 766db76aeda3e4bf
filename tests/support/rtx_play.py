"""What only TensorRT for RTX does when a plan is built: it is told what to build for, and logs the layers.

Like the installed library, as `tests/unit/test_rtx_surface.py` shows.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from tests.support.fake_tensorrt import Plays, new

if TYPE_CHECKING:
    from tests.support.tensorrt_play import Scenario

_NO_OP = "Use Deprecated in TensorRT-RTX 1.2. Timing cache operations are no-ops in TensorRT-RTX. instead."
_TIMING = (
    ("IBuilderConfig", "set_timing_cache"),
    ("IBuilderConfig", "get_timing_cache"),
    ("ITimingCache", "serialize"),
)
_UNSET = "NONE"


def plays(s: Scenario, common: Plays) -> Plays:
    """The plays of TensorRT, with those of RTX over them."""

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
    lines = ["Layers:", _layer("__mye399_0_myl0_0", "shape_call", "", "", "")]
    lines.append(_layer("__myl_CastTran_myl0_1", "kgen", _tensor("images", "UInt8"), "", _tensor("t0", data_types[0])))
    for index, kind in enumerate(data_types):
        constants = f"{_tensor(f'w{index}', kind)}, {_tensor(f'alpha{index}', 'Float')}"
        name, given, made = f"conv{index}_myl0_{index + 2}", _tensor(f"t{index}", kind), _tensor(f"t{index + 1}", kind)
        lines.append(_layer(name, "correlation", given, constants, made))
    lines.append(_layer(f"__mye4675_myl0_{len(lines)}", "signal", "", "", "", ", EventId: 1"))
    lines += ["", "I/O Tensors:", " Name: images, IOMode: Input, DataType: UInt8, Dimensions: [-1,8,8,3]"]
    return "\n".join([*lines, "", "Engine Metadata:", " Multi-Device: Disabled"])


def _layer(name: str, kind: str, inputs: str, constants: str, outputs: str, event: str = "") -> str:
    sides = {"Inputs": inputs, "Constants": constants, "Outputs": outputs}
    tensors = ", ".join(f"{side}: [{text and ' '}{text}]" for side, text in sides.items())
    metadata = "" if not inputs else "[ONNX Layer: node_conv2d][ONNX Layer: node_relu]"
    return f"Name: {name}, LayerType: {kind}, {tensors}, TacticName: , StreamId: 0{event}, Metadata: {metadata}"


def _tensor(name: str, kind: str) -> str:
    layout = "Dimensions: [-1,16,8,8], Strides: [1024,1,128,16], StrideOrder: [3,0,2,1]"
    return f"{{ Name: {name}, {layout}, Datatype: {kind}, Format: (NHWC) Channel major format }}"
