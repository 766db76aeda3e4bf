"""OpenVINO on the CPU: one compiled model for all batch sizes, which reads the staging buffers directly.

Besides fp32 it runs INT8 from the same QDQ file as ONNX Runtime, and BF16 if the processor has it. The precision is
always set, because by default OpenVINO computes fp32 in BF16 on such processors. It would silently narrow types above
32 bits, accept sizes that do not fit together, and not check a request's indices. So models with such types, dynamic
sizes, strings or lookups are refused here and served by ONNX Runtime. Outputs stay in OpenVINO's memory, because it
does not check the size of memory that it is given.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from convoy.app.engines import cpu
from convoy.app.engines.base import Signature, check_names
from convoy.app.engines.batch import EngineFailure
from convoy.app.engines.memory import is_short
from convoy.app.engines.parts import Landed, Shapes
from convoy.app.engines.staged import StagedEngine
from convoy.models.bundle import Precision
from convoy.models.checkout import pip_install
from convoy.models.errors import BundleError, JobError
from convoy.models.spec import TensorSpec

_INSTALL = pip_install("openvino")
# Its converter, which Convoy does not use, reports every import to its maker and stores a client id.
_TELLTALE = "openvino.tools.ovc"
_DTYPES = {
    "boolean": "BOOL",
    "u8": "UINT8",
    "i8": "INT8",
    "u16": "UINT16",
    "i16": "INT16",
    "i32": "INT32",
    "f16": "FP16",
    "f32": "FP32",
}


class OpenVinoEngine(StagedEngine):
    """One compiled model, and one inference request that is run again and again."""

    name = "openvino"
    places_outputs = False

    def _open(self, model: Path, precision: Precision, threads: int) -> str:
        if free := [spec.name for spec in (*self.inputs, *self.outputs) if spec.sample_bytes is None]:
            raise BundleError(f"{model}: tensor {free[0]!r} has no fixed size, which Convoy does not run in OpenVINO")
        try:
            self._ov = load_openvino()
        except JobError as error:
            raise BundleError(str(error)) from error
        core = _core()
        # OpenVINO claims the capability also on processors that only convert.
        can_bf16 = cpu.has_bf16() and "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        if precision == "bf16" and not can_bf16:
            raise BundleError(f"{model}: this processor does not support BF16")
        options = {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "INFERENCE_PRECISION_HINT": "bf16" if precision == "bf16" else "f32",
            # Cores are shared with the event loop and other models.
            "ENABLE_CPU_PINNING": False,
        }
        try:
            graph = _read(model)
            unchecked = _unchecked_lookup(graph)
            self._compiled = compiled = core.compile_model(graph, "CPU", options)
        except Exception as error:  # RuntimeError, and whatever the reader raises
            raise BundleError(f"{model}: OpenVINO cannot load it ({_message(error)})") from error
        if unchecked is not None:
            raise BundleError(f"{model}: {unchecked!r} indexes with values of a request, which OpenVINO does not check")
        have = [
            tuple(_spec(model, port, promised) for port, promised in zip_longest(ports, ours[: len(ports)]))
            for ports, ours in ((compiled.inputs, self.inputs), (compiled.outputs, self.outputs))
        ]
        check_names(model, Signature(*have), self.inputs, self.outputs)
        self._request = compiled.create_infer_request()
        self._largest_samples = 0  # batch sizes whose memory is held
        self._now: Shapes | None = None
        return library_of(self._ov)

    def close(self) -> None:
        super().close()
        self._compiled = self._request = None

    def rest(self) -> None:
        self._compiled.release_memory()
        self._largest_samples = 0

    def _forget(self) -> None:
        super()._forget()
        self._now = None

    def _execute(self, shapes: Shapes, samples: int) -> list[Landed]:
        self._hold(samples)
        bound = self._bound(shapes, samples)
        try:
            if shapes != self._now:
                for index, tensor in enumerate(bound):
                    self._request.set_input_tensor(index, tensor)
                self._now = shapes
            self._request.infer(share_outputs=True)
            arrays = [self._request.get_output_tensor(index).data for index in range(len(self.outputs))]
            return [Landed(array, array.reshape(-1).view(np.uint8).data if array.size else None) for array in arrays]
        except Exception as error:  # RuntimeError, and whatever the bindings raise
            self._now = None
            raise EngineFailure(_message(error)) from error

    def _hold(self, samples: int) -> None:
        """If memory is short, free the memory of a smaller run before a larger one.

        Not after a run, whose outputs are there until they are copied.
        """
        if samples > self._largest_samples:
            if is_short():
                self.rest()
            self._largest_samples = samples

    def _bind(self, shapes: Shapes, samples: int) -> list[Any]:
        """Make tensors over the staging buffers."""
        return [
            self._ov.Tensor(staging.array(shape), shared_memory=True)
            for staging, shape in zip(self._staging_in, shapes, strict=True)
        ]


def library_of(module: Any) -> str:
    """The library and its version, under which latencies are stored."""
    return f"openvino {version_of(module)}"


def layers_in_8_bits(model: Path) -> frozenset[str]:
    """The names of nodes and tensors of an ONNX file that 8-bit kernels compute on this processor.

    Read from its compiled form, in which everything possible is fused. Raises BundleError if it cannot be loaded, and
    JobError if OpenVINO is not installed.
    """
    core = _core()
    try:
        compiled = core.compile_model(_read(model), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    except Exception as error:  # RuntimeError, and whatever the reader raises
        raise BundleError(f"{model}: OpenVINO cannot load it ({_message(error)})") from error
    found: set[str] = set()
    for node in compiled.get_runtime_model().get_ops():
        told = {key: str(value.astype(str)) for key, value in node.get_rt_info().items()}
        if told.get("runtimePrecision") in ("u8", "i8"):
            for name in told["originalLayersNames"].split(","):
                # The parts of an operator that was split are named after it: its name, "/" and theirs.
                found |= {name[:end] for end, letter in enumerate(name) if letter == "/" and end} | {name}
    return frozenset(found)


def _read(model: Path) -> Any:
    # By name: otherwise every reader tries a broken file and logs an error.
    reader = load_openvino().frontend.FrontEndManager().load_by_framework("onnx")
    return reader.convert(reader.load(str(model)))


def _unchecked_lookup(graph: Any) -> str | None:
    """A node that looks up a tensor at indices from an input; GatherElements is checked."""
    for node in graph.get_ops():
        if node.get_type_name() in ("Gather", "GatherND") and _depends_on_values(node.input_value(1).get_node()):
            return str(node.get_friendly_name())
    return None


def _depends_on_values(node: Any) -> bool:
    new, seen = [node], set()
    while new:
        one = new.pop()
        if one.get_type_name() == "Parameter":
            return True
        if one.get_name() not in seen and one.get_type_name() != "ShapeOf":
            seen.add(one.get_name())
            new += [value.get_node() for value in one.input_values()]
    return False


def _spec(model: Path, port: Any, promised: TensorSpec | None) -> TensorSpec:
    """A tensor of the compiled model, which may have several names. Raises BundleError."""
    dtype = port.element_type.get_type_name()
    name = promised.name if promised is not None and promised.name in port.names else port.any_name
    if dtype not in _DTYPES:
        raise BundleError(f"{model}: tensor {name!r} is {dtype}, which OpenVINO does not support as is")
    return TensorSpec(name, _DTYPES[dtype], ())


@cache
def _core() -> Any:
    return load_openvino().Core()


@cache
def load_openvino() -> Any:
    """Import OpenVINO. Raises JobError if it is missing or does not load."""
    before = sys.modules.get(_TELLTALE)
    sys.modules[_TELLTALE] = None  # type: ignore[assignment]  # as good as not installed
    try:
        return importlib.import_module("openvino")
    except (ImportError, OSError, RuntimeError) as error:
        # It may be installed without a module that it needs.
        if isinstance(error, ModuleNotFoundError) and error.name == "openvino":
            raise JobError(f"OpenVINO is not installed; run {_INSTALL}") from error
        raise JobError(f"OpenVINO does not load ({error}); run {_INSTALL}") from error
    finally:
        del sys.modules[_TELLTALE]
        if before is not None:
            sys.modules[_TELLTALE] = before


def version_of(module: Any) -> str:
    """The version: 2026.4.1 of 2026.4.1-22982-e213a147257-releases/2026/4."""
    return str(module.__version__).partition("-")[0]


def _message(error: Exception) -> str:
    """The message of a library error, without the place in its source."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [
        line for line in lines if line and not line.startswith(("Exception from ", "Check '", "FrontEnd API failed"))
    ]
    return said[0] if said else type(error).__name__
