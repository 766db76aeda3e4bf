"""Which outputs have a scale of their own: probabilities, and numbers that are normalised to -1..1.

Of those a difference means the same whatever the size of the answer, so that it is measured absolutely: where a picture
shows no object, all scores of a detector are next to nothing, and a rounding is large beside them. The graph tells it,
or what is declared of an output does; values alone do not, for small numbers are not therefore normalised.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from convoy.export.rows import Rows
from convoy.export.variants.onnx_graph import array, constants, producers
from convoy.models.spec import ModelSpec

_TOLERANCE = 1e-3
_MOST_STEPS = 200
# Their values are within -1..1 whatever goes in.
_BOUNDED = frozenset({"Sigmoid", "HardSigmoid", "Softmax", "Hardmax", "Tanh", "Softsign", "LpNormalization"})
_BOUNDED |= {"Sin", "Cos", "Erf"}
# Their values are some of the first input's, or means of these.
_PASSING = frozenset({"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Dropout", "Cast"})
_PASSING |= {"Slice", "Gather", "GatherND", "GatherElements", "Split", "Expand", "Tile", "TopK", "Compress"}
_PASSING |= {"DepthToSpace", "SpaceToDepth", "GlobalAveragePool", "AveragePool", "ReduceMean"}
_PASSING |= {"GlobalMaxPool", "MaxPool", "ReduceMax", "ReduceMin", "Neg", "Abs"}
# Their values are some of any input's, or products of all.
_ALL = frozenset({"Concat", "Mul", "Max", "Min"})
_NORMS = frozenset({"ReduceL2", "ReduceL1"})


def normalised_outputs(graph: Path, spec: ModelSpec, reference: Rows) -> frozenset[str]:
    """The float outputs that the graph bounds by -1..1, or that are declared as probabilities or as relative boxes.

    `reference` are the original's answers, which must be within these bounds as well.
    """
    reader = _RangeReader(onnx.load(str(graph), load_external_data=False).graph)
    declared = declared_shares(spec)
    if spec.detection is not None and spec.detection.box_unit != "pixels":
        declared |= {spec.detection.boxes}
    return frozenset(
        name
        for name, values in reference.items()
        if values.dtype.kind == "f" and _is_within(values) and (name in declared or reader.is_bounded(name))
    )


def declared_shares(spec: ModelSpec) -> frozenset[str]:
    """The outputs whose values are probabilities as they come, by the task."""
    if spec.activation != "none":
        return frozenset()
    if spec.detection is not None:
        return frozenset({spec.detection.scores})
    return frozenset({spec.outputs[0].name} if spec.gives_classes else ())


def _is_within(values: np.ndarray) -> bool:
    return bool((np.abs(values.astype(np.float64)) <= 1 + _TOLERANCE).all())


class _RangeReader:
    def __init__(self, graph: Any) -> None:
        self._made: Mapping[str, Any] = producers(graph)
        self._constants = constants(graph)
        self._known: dict[str, bool] = {}

    def is_bounded(self, tensor: str, steps: int = _MOST_STEPS) -> bool:
        """Whether the values are within -1..1 for what is known of the operators behind them."""
        if tensor not in self._known:
            self._known[tensor] = steps > 0 and self._look(tensor, steps - 1)
        return self._known[tensor]

    def _look(self, tensor: str, steps: int) -> bool:
        if tensor in self._constants:
            return self._is_small(tensor)
        node = self._made.get(tensor)
        if node is None or not node.input:
            return False
        kind, inputs = node.op_type, [name for name in node.input if name]
        if kind in _BOUNDED:
            return True
        if kind in _PASSING:
            # The second output of these two has numbers of places.
            return self.is_bounded(inputs[0], steps) and not (kind in ("TopK", "MaxPool") and tensor != node.output[0])
        if kind == "Clip":
            is_cut = len(inputs) == 3 and all(map(self._is_small, inputs[1:]))
            return is_cut or self.is_bounded(inputs[0], steps)
        if kind in _ALL:
            return all(self.is_bounded(name, steps) for name in inputs)
        if kind == "Where":
            return all(self.is_bounded(name, steps) for name in inputs[1:])
        return kind == "Div" and self._is_norm(inputs[1], inputs[0], steps)

    def _is_norm(self, total: str, value: str, steps: int) -> bool:
        """Whether `total` is the sum or the length of `value`, kept above zero, and for all of a row."""
        node = self._made.get(total)
        while node is not None and node.op_type in ("Expand", "Clip", "Max", "Identity", "Add", "Unsqueeze", "Reshape"):
            node = self._made.get(node.input[0])
        if node is None:
            return False
        if node.op_type == "Sqrt":
            inner = self._made.get(node.input[0])
            return inner is not None and inner.op_type in ("ReduceSum", "ReduceSumSquare", "Add", "Clip")
        if node.op_type in _NORMS:
            return bool(node.input[0] == value)
        powers = self._made.get(value)
        return node.op_type == "ReduceSum" and node.input[0] == value and powers is not None and powers.op_type == "Exp"

    def _is_small(self, name: str) -> bool:
        constant = self._constants.get(name)
        if constant is None or constant.external_data:
            return False
        values = array(constant)
        return values.dtype.kind == "f" and bool((np.abs(values) <= 1).all())
