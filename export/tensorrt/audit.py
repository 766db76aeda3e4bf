"""What of a plan really runs in the precision on its label.

Knows the engine inspector's JSON, in the words of TensorRT 10 and of 11; needs no TensorRT. People have
shipped FP32 engines named fp16 for months: a plan's label is checked here, not believed.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from models.bundle import Precision
from models.errors import JobError
from models.plans import PlanAudit

# Under this share of the computing layers a plan is not what its label says. Sound graphs are far above: what
# range keeps in FP32 is a few layers, and INT8 leaves out small convolutions but not nine in ten. Graphs whose
# conversion silently did nothing are at zero or at a stray layer.
SMALLEST_SHARE = 0.1

# Layers that convert or move data: in a label's precision they prove nothing, in another they disprove nothing.
_CONVERTING = frozenset(("cast", "dequantize", "quantize", "reformat"))
_ARRANGING = frozenset(("concatenation", "copy", "gather", "reshape", "shape", "shuffle", "slice", "transpose"))
_MOVING = _CONVERTING | _ARRANGING | {"constant", "identity", "noop", "signal", "wait"}
# A word in the inspector's text -> precision, narrowest first. BF16 and UINT8 come before the words inside them.
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
    """Count the layers in the inspector's JSON. Raises JobError for what is not that JSON."""
    try:
        layers = json.loads(report)["Layers"]
    except (ValueError, KeyError, TypeError) as error:
        raise JobError("TensorRT's inspector gave no list of layers; report this with your TensorRT version") from error
    computing = [layer for layer in layers if not _moves(layer)]
    counts = Counter(_precision(layer) for layer in computing)
    return PlanAudit(dict(sorted(counts.items())), len(layers) - len(computing))


def says_nothing(audit: PlanAudit) -> bool:
    """Whether the inspector told no data type at all, as it may before shapes are known."""
    return set(audit.by_precision) <= {UNKNOWN}


def check_audit(audit: PlanAudit, precision: Precision, name: str) -> None:
    """Raises JobError if hardly any layer runs in `precision`. FP32 is what remains and needs no proof."""
    if precision == "fp32":
        return
    if says_nothing(audit):
        raise JobError(f"{name}: TensorRT tells no layer's data type, so that {precision} cannot be proved; use fp32")
    have = audit.by_precision.get(precision, 0)
    if have < SMALLEST_SHARE * audit.layers:
        raise JobError(
            f"{name}: only {have} of {audit.layers} computing layers run in {precision}, so this is no {precision} "
            "plan; the graph decides every type: convert the model again, or build it as fp32"
        )


def _moves(layer: Any) -> bool:
    return isinstance(layer, dict) and str(layer.get("LayerType", "")).lower() in _MOVING


def _precision(layer: Any) -> str:
    """The narrowest type that goes in or comes out: an INT8 convolution that answers in FP16 computes in INT8."""
    if not isinstance(layer, dict):
        return UNKNOWN  # only the name, as without detailed verbosity
    tensors = [tensor for side in ("Inputs", "Outputs") for tensor in layer.get(side) or [] if isinstance(tensor, dict)]
    found = {_data_type(tensor) for tensor in tensors} - {None}
    return next((precision for precision in _NARROWEST_FIRST if precision in found), UNKNOWN)


def _data_type(tensor: dict[str, Any]) -> str | None:
    # 10.x has "Format/Datatype" ("Half", or "Row major linear FP16 format"); 11.x has the two apart.
    for key in ("DataType", "Datatype", "Format/Datatype", "Format"):
        text = str(tensor.get(key, "")).lower()
        for word, precision in _WORDS:
            if word in text:
                return precision
    return None
