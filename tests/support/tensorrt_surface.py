"""What an installed TensorRT has: its classes, signatures, properties, enums and functions, as plain data.

    python -m tests.support.tensorrt_surface tensorrt_rtx tests/data/tensorrt-rtx-api-1.7.json

`fake_tensorrt` is made from such a recording. Knows how pybind11 writes its docstrings; needs neither GPU nor driver.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

# What building and running plans can be made of. Layers and plugins are left out: graphs come from ONNX.
CLASSES = (
    "Builder",
    "BuilderFlag",
    "ComputeCapability",
    "CudaGraphStrategy",
    "DataType",
    "DynamicShapesKernelSpecializationStrategy",
    "EngineInspector",
    "EngineStat",
    "EngineValidity",
    "ErrorCode",
    "ExecutionContextAllocationStrategy",
    "HardwareCompatibilityLevel",
    "IBuilderConfig",
    "ICudaEngine",
    "IExecutionContext",
    "IHostMemory",
    "ILogger",
    "INetworkDefinition",
    "IOptimizationProfile",
    "IOutputAllocator",
    "IProfiler",
    "IProgressMonitor",
    "IRuntimeCache",
    "IRuntimeConfig",
    "IStreamReaderV2",
    "ITensor",
    "ITimingCache",
    "LayerInformationFormat",
    "Logger",
    "MemoryPoolType",
    "NetworkDefinitionCreationFlag",
    "OnnxParser",
    "OnnxParserFlag",
    "ParserError",
    "PreviewFeature",
    "ProfilingVerbosity",
    "Runtime",
    "RuntimePlatform",
    "TacticSource",
    "TensorIOMode",
    "TensorLocation",
)
_CONSTRUCTOR = "__init__"


def record(module: Any) -> dict[str, Any]:
    """The surface of a TensorRT module: of CLASSES those that it has, and all its functions."""
    return {
        "classes": {name: _members(getattr(module, name), module) for name in CLASSES if hasattr(module, name)},
        "functions": sorted(name for name, value in vars(module).items() if _is_function(name, value)),
        "version": module.__version__,
    }


def _members(kind: type, module: ModuleType) -> dict[str, Any]:
    names = [name for name in dir(kind) if not name.startswith("_") or name == _CONSTRUCTOR]
    return {name: _member(kind, name, module) for name in names}


def _member(kind: type, name: str, module: ModuleType) -> Any:
    if name in getattr(kind, "__members__", ()):
        return "enum"
    value = getattr(kind, name)
    if isinstance(inspect.getattr_static(kind, name), property):
        return "property"
    return _signatures(name, value.__doc__ or "", module) if callable(value) else "attribute"


def _signatures(name: str, doc: str, module: ModuleType) -> list[str]:
    """The lines of a docstring that tell how something is called, one per overload, without the names of modules."""
    numbered = r"\d+\. " if "Overloaded function." in doc else ""
    found = re.findall(rf"^{numbered}({re.escape(name)}\(.*\) -> .+)$", doc, re.MULTILINE)
    first = doc.strip().partition("\n")[0]
    # Which modules have `Buffer` and `CapsuleType` depends on the Python, not on the library.
    elsewhere = rf"\b(?:{module.__name__}_bindings\.{module.__name__}|typing_extensions|collections\.abc|types)\.(?=\w)"
    return [re.sub(elsewhere, "", text) for text in found or [first]]


def _is_function(name: str, value: Any) -> bool:
    return not name.startswith("_") and inspect.isroutine(value)


def main(module: str, target: str) -> None:
    """Write the surface of the installed `module` to `target`."""
    text = json.dumps(record(importlib.import_module(module)), indent=1, sort_keys=True)
    Path(target).write_text(text + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
