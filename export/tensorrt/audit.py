"""What of a plan really runs in the precision on its label.

Reads the engine inspector's JSON of TensorRT 10 and 11, and the same list in the log of TensorRT for RTX's builder.
FP32 engines named fp16 have been shipped for months, so a plan's label is checked here.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from convoy.models.bundle import Precision
from convoy.models.errors import FileRefused, JobError
from convoy.models.plans import PlanAudit

# Below this share of computing layers, a plan is not what its label says. Sound graphs are far above: only a few layers
# stay in FP32 for their range, and INT8 leaves out small convolutions, but not nine in ten. Graphs whose conversion
# silently did nothing are at zero or have a single stray layer.
SMALLEST_SHARE = 0.1

# Layers that convert or move data prove nothing about a precision.
_HEAVY = frozenset(("convolution", "correlation", "gemm", "runtime_fusion"))
_CONVERTING = frozenset(("cast", "dequantize", "quantize", "reformat"))
_ARRANGING = frozenset(("concatenation", "copy", "gather", "reshape", "shape", "shuffle", "slice", "transpose"))
_MOVING = _CONVERTING | _ARRANGING | {"constant", "identity", "noop", "shape_call", "signal", "wait"}
# A word in the inspector's text -> precision, narrowest first. BF16 and UINT8 come before the words that they contain.
_WORDS = (
    ("bfloat16", "bf16"),
    ("bf16", "bf16"),
    ("uint8", "other"),
    ("fp4", "fp4"),
    ("int4", "int4"),
    ("fp8", "fp8"),
    ("int8", "int8"),
    ("fp16", "fp16"),
    ("half", "fp16"),
    ("fp32", "fp32"),
    ("float", "fp32"),
    ("int32", "other"),
    ("int64", "other"),
    ("bool", "other"),
)
_NARROWEST_FIRST = ("fp4", "int4", "fp8", "int8", "fp16", "bf16", "fp32", "other")
UNKNOWN = "unknown"


def read_audit(report: str) -> PlanAudit:
    """Count the layers in the inspector's JSON. Raises JobError if it is not that JSON."""
    try:
        layers = json.loads(report)["Layers"]
    except (ValueError, KeyError, TypeError) as error:
        raise JobError("TensorRT's inspector gave no list of layers; report this with your TensorRT version") from error
    return _counted(layers)


def _counted(layers: list[Any]) -> PlanAudit:
    computing = [layer for layer in layers if not _moves(layer)]
    counts = Counter(_precision(layer) for layer in computing)
    return PlanAudit(dict(sorted(counts.items())), len(layers) - len(computing))


def read_listing(text: str) -> PlanAudit | None:
    """Count the layers in the builder's list; None if it names none, because a log is not an interface.

    Counts convolutions and products by their inputs: they output FP32 whatever they compute in, and kernels between
    them fuse everything from a shuffle to a quantisation. If there are none, all layers count.

        Name: node_conv2d, LayerType: correlation, Inputs: [ { Name: images, ..., Datatype: Half, ...}], Constants: ...
    """
    layers = [layer for line in text.splitlines() if line.startswith("Name: ") and (layer := _listed(line))]
    if not layers:
        return None
    heavy = [{**layer, "Outputs": []} for layer in layers if layer["LayerType"] in _HEAVY]
    audit = _counted(heavy or layers)
    return PlanAudit(audit.by_precision, len(layers) - audit.layers)


def _listed(line: str) -> dict[str, Any]:
    """A line in the inspector's form; empty if it is not a layer."""
    kind = _LISTED_TYPE.search(line)
    if kind is None:
        return {}
    sides = {name: _LISTED_DATA_TYPE.findall(text) for name, text in _LISTED_SIDE.findall(line)}
    return {"LayerType": kind[1]} | {
        side: [{"Datatype": data_type} for data_type in sides.get(side, [])] for side in ("Inputs", "Outputs")
    }


_LISTED_TYPE = re.compile(r"LayerType: (\w+)")
_LISTED_SIDE = re.compile(r"(Inputs|Constants|Outputs): \[(.*?)\](?=, (?:Inputs|Constants|Outputs|TacticName)|$)")
_LISTED_DATA_TYPE = re.compile(r"Datatype: (\w+)")


def says_nothing(audit: PlanAudit) -> bool:
    """Whether the inspector reported no data types at all, as it may before shapes are known."""
    return set(audit.by_precision) <= {UNKNOWN}


def check_audit(audit: PlanAudit, precision: Precision, name: str) -> None:
    """Raise FileRefused if hardly any layer runs in `precision`. FP32 is the default and needs no proof."""
    if precision == "fp32":
        return
    if says_nothing(audit):
        raise FileRefused(
            f"{name}: TensorRT tells no layer's data type, so that {precision} cannot be proved; use fp32"
        )
    have = audit.by_precision.get(precision, 0)
    if have < SMALLEST_SHARE * audit.layers:
        raise FileRefused(
            f"{name}: only {have} of {audit.layers} computing layers run in {precision}, so this is no {precision} "
            "plan; the graph decides every type: convert the model again, or build it as fp32"
        )


def _moves(layer: Any) -> bool:
    return isinstance(layer, dict) and str(layer.get("LayerType", "")).lower() in _MOVING


def _precision(layer: Any) -> str:
    """The narrowest input or output type: an INT8 convolution that outputs FP16 computes in INT8."""
    if not isinstance(layer, dict):
        return UNKNOWN  # only the name, without detailed verbosity
    tensors = [tensor for side in ("Inputs", "Outputs") for tensor in layer.get(side) or [] if isinstance(tensor, dict)]
    found = {_data_type(tensor) for tensor in tensors} - {None}
    return next((precision for precision in _NARROWEST_FIRST if precision in found), UNKNOWN)


def _data_type(tensor: dict[str, Any]) -> str | None:
    # 10.x has "Format/Datatype" ("Half", or "Row major linear FP16 format"); 11.x separates the two.
    for key in ("DataType", "Datatype", "Format/Datatype", "Format"):
        text = str(tensor.get(key, "")).lower()
        for word, precision in _WORDS:
            if word in text:
                return precision
    return None
