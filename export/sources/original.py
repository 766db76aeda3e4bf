"""An ONNX file's own answers: what is made of it is held against these.

They are those of ONNX Runtime without any optimisation of the graph, node by node: what serves is optimised, and a
fault of that is what a proof has to find. Files that compute in fewer bits answer otherwise when their nodes are not
fused, by as much as they round. They are run as they will serve, and only gross differences from the other way are
refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from convoy.app.engines.onnxruntime import open_original, open_session
from convoy.export.sources import onnx_file
from convoy.models.errors import JobError

# ||a - b|| / ||b|| of what rounds to 16 bits behind each node or not, and of what rounds to 8.
_HALF_ERROR, _EIGHT_BIT_ERROR = 0.05, 0.5
_QUANTISING = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})


def rounding_of(path: Path) -> float:
    """How far the file's answers may be from each other, optimised and not; 0 where it computes in 32 bits or more."""
    model = onnx_file.read(path)
    if any(node.op_type in _QUANTISING or node.op_type.startswith(("QLinear", "QGemm")) for node in model.graph.node):
        return _EIGHT_BIT_ERROR
    halves = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
    types = {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    types |= {tensor.data_type for tensor in onnx_file.tensors(model.graph)}
    casts = {a.i for node in model.graph.node if node.op_type == "Cast" for a in node.attribute if a.name == "to"}
    return _HALF_ERROR if (types | casts) & halves else 0.0


def open_reference(path: Path, threads: int, *, quiet: bool = False) -> Any:
    """A session whose answers count as the file's; its `run` may raise OptimisedOtherwiseError. Raises BundleError."""
    plain = open_original(path, threads, quiet=quiet)
    allowed = rounding_of(path)
    return _Checked(path, open_session(path, threads, quiet=quiet), plain, allowed) if allowed else plain


class OptimisedOtherwiseError(JobError):
    """The graph's optimisation changes what it answers."""


@dataclass(frozen=True, slots=True)
class _Checked:
    """Answers of `optimised`, each of which is no further from that of `plain` than `allowed`."""

    path: Path
    optimised: Any
    plain: Any
    allowed: float

    def get_outputs(self) -> Any:
        return self.optimised.get_outputs()

    def run(self, names: Sequence[str], inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        answers: list[np.ndarray] = self.optimised.run(names, inputs)
        for name, own, other in zip(names, answers, self.plain.run(names, inputs), strict=True):
            if own.dtype.kind == "f" and (error := _difference(own, other)) > self.allowed:
                raise OptimisedOtherwiseError(
                    f"{self.path.name} answers otherwise in {name} when ONNX Runtime optimises its graph, by "
                    f"{error:.2g} of it: what would serve is not what the file means; export it again, in FP32"
                )
        return answers


def _difference(answers: np.ndarray, expected: np.ndarray) -> float:
    usual = np.isfinite(expected) & np.isfinite(answers)
    own, other = (np.where(usual, one, 0).astype(np.float64).ravel() for one in (answers, expected))
    # What is next to nothing is nothing but rounding.
    return float(np.linalg.norm(own - other) / max(float(np.linalg.norm(other)), 1e-2))
