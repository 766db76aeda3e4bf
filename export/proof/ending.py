"""What the end of a graph says about its outputs: probabilities, their logarithms, sigmoids, or unbounded numbers.

Walks back from the output through operators that change no values (Identity, Reshape, Flatten, ...) and knows the
spellings of softmax, log-softmax and sigmoid that exporters and people write. Looks only at operators;
`convoy.export.proof.activation` checks the outputs, so a likely spelling is enough here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx

from convoy.export.rows import Rows
from convoy.export.variants.onnx_graph import array, constants, producers
from convoy.models.spec import ModelSpec

# "unbounded": nothing limits the values, as after a linear layer. "clipped": cut off at a bound, which may or may not
# be a probability's. "derived": computed from probabilities or their logarithms, such as percentages, so never logits.
# "unknown": the operators say nothing.
Kind = Literal["softmax", "log_softmax", "sigmoid", "unbounded", "clipped", "derived", "unknown"]

_UNCHANGED = frozenset({"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Cast", "Dropout", "Transpose"})
_REPEATED = _UNCHANGED | {"Expand", "Tile"}
_LINEAR = frozenset({"Gemm", "MatMul", "Conv", "ConvTranspose", "BatchNormalization", "Einsum"})
_RECTIFIERS = frozenset(
    {"Relu", "LeakyRelu", "PRelu", "Elu", "Selu", "Celu", "Softplus", "ThresholdedRelu", "Gelu", "HardSwish", "Mish"}
)
# The mean of bounded values is bounded, that of others is not; the same holds for a part of them.
_MEANS_AND_PARTS = frozenset(
    {"GlobalAveragePool", "AveragePool", "ReduceMean", "Slice", "Gather", "GlobalMaxPool", "MaxPool", "ReduceMax"}
)
_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "Neg", "Sum", "Mean", "Concat"})
# Beyond arithmetic, operators that do not turn probabilities into logits. (Log of probabilities and Exp of their
# logarithms are recognised before.)
_DERIVING = _ARITHMETIC | {"Log", "Exp", "Pow", "Sqrt", "Abs", "Round", "Reciprocal", "ReduceSum", "Where", "Max"}
_OF_PROBABILITIES = frozenset({"softmax", "log_softmax", "sigmoid", "derived"})


@dataclass(frozen=True, slots=True)
class Ending:
    """`words` names the recognised operators."""

    kind: Kind
    words: str


def read_ending(path: Path) -> Ending:
    """How the only output of the ONNX file is computed."""
    graph = onnx.load(str(path), load_external_data=False).graph
    return _EndingReader(graph).read(graph.output[0].name, 64)


class _GraphReader:
    def __init__(self, graph: Any) -> None:
        self._made: Mapping[str, Any] = producers(graph)
        self._constants = constants(graph)


class _EndingReader(_GraphReader):
    def read(self, tensor: str, steps: int) -> Ending:
        node = self._node(tensor)
        if node is None or steps == 0:
            return Ending("unknown", "no operator that is known here")
        kind = node.op_type
        if kind in ("Softmax", "LogSoftmax", "Sigmoid", "HardSigmoid"):
            return Ending({"Softmax": "softmax", "LogSoftmax": "log_softmax"}.get(kind, "sigmoid"), kind)  # type: ignore[arg-type]
        if kind in _LINEAR or kind in _RECTIFIERS:
            return Ending("unbounded", kind)
        if kind in ("Clip", "Min"):
            return self._derived(node, steps) or Ending("clipped", kind)
        if kind in _MEANS_AND_PARTS:
            return self._mean_or_part(node, steps)
        return self._written_out(node) or self._arithmetic(node, steps) or Ending("unknown", kind)

    def _mean_or_part(self, node: Any, steps: int) -> Ending:
        inner = self.read(node.input[0], steps - 1)
        if inner.kind in ("unbounded", "clipped"):
            return Ending(inner.kind, f"{inner.words}, {node.op_type}")
        if inner.kind in ("softmax", "sigmoid", "derived"):
            return Ending("derived", f"{inner.words}, {node.op_type}")
        return Ending("unknown", f"{inner.words}, {node.op_type}")

    def _written_out(self, node: Any) -> Ending | None:
        """Softmax, log-softmax and sigmoid written as arithmetic."""
        kind = node.op_type
        if kind == "Div" and self._is_share(node.input[0], node.input[1]):
            return Ending("softmax", "a division by the sum")
        if kind == "Mul":
            for value, factor in (tuple(node.input), tuple(reversed(node.input))):
                inverse = self._node(factor, _REPEATED)
                if inverse is not None and inverse.op_type == "Reciprocal" and self._is_share(value, inverse.input[0]):
                    return Ending("softmax", "a product with the sum's reciprocal")
        if kind == "Sub" and self._is_log_of_sum(node.input[1], 4):
            return Ending("log_softmax", "a subtraction of the logarithm of a sum")
        if kind == "Log" and self.read(node.input[0], 4).kind == "softmax":
            return Ending("log_softmax", "the logarithm of a softmax")
        if kind == "Exp" and self.read(node.input[0], 8).kind == "log_softmax":
            return Ending("softmax", "the powers of a log-softmax")
        if (kind == "Div" and self._is_one(node.input[0]) and self._is_one_and_power(node.input[1])) or (
            kind == "Reciprocal" and self._is_one_and_power(node.input[0])
        ):
            return Ending("sigmoid", "1 / (1 + exp(-x))")
        return None

    def _arithmetic(self, node: Any, steps: int) -> Ending | None:
        """Sums, differences and multiples of unbounded values are unbounded; those of probabilities are derived."""
        if node.op_type in _DERIVING:
            derived = self._derived(node, steps)
            if derived is not None:
                return derived
        if node.op_type not in _ARITHMETIC:
            return None
        parts = self._parts(node, steps)
        if parts and all(part.kind == "unbounded" for part in parts):
            inner = self._node(node.input[0])
            if node.op_type == "Neg" and inner is not None and inner.op_type == "Softplus":
                return Ending("derived", "the logarithm of a sigmoid")  # -log(1 + exp(-x))
            return Ending("unbounded", f"{parts[0].words}, {node.op_type}")
        return None

    def _derived(self, node: Any, steps: int) -> Ending | None:
        parts = self._parts(node, steps)
        of_probabilities = [part for part in parts if part.kind in _OF_PROBABILITIES]
        # A product of those and something else, such as x * sigmoid(x), is as unbounded as the other factor.
        if not of_probabilities or (node.op_type == "Mul" and len(of_probabilities) < len(parts)):
            return None
        return Ending("derived", f"{of_probabilities[0].words}, {node.op_type}")

    def _parts(self, node: Any, steps: int) -> list[Ending]:
        return [self.read(name, steps - 1) for name in node.input if name and self._source(name) not in self._constants]

    def _is_share(self, value: str, total: str) -> bool:
        """Whether `total` is the sum of `value`."""
        summed = self._node(total, _REPEATED)
        if summed is None or summed.op_type not in ("ReduceSum", "ReduceL1"):
            return False
        return self._source(summed.input[0]) == self._source(value)

    def _is_log_of_sum(self, tensor: str, steps: int) -> bool:
        """log(sum(exp(...))), possibly with the maximum subtracted before and added again."""
        node = self._node(tensor, _REPEATED)
        if node is None or steps == 0:
            return False
        if node.op_type == "ReduceLogSumExp":
            return True
        if node.op_type == "Add":
            return any(self._is_log_of_sum(name, steps - 1) for name in node.input)
        summed = self._node(node.input[0], _REPEATED) if node.op_type == "Log" else None
        powers = self._node(summed.input[0]) if summed is not None and summed.op_type == "ReduceSum" else None
        return powers is not None and powers.op_type == "Exp"

    def _is_one_and_power(self, tensor: str) -> bool:
        node = self._node(tensor)
        if node is None or node.op_type != "Add":
            return False
        others = [self._node(name) for name in node.input if not self._is_one(name)]
        return len(others) == 1 and others[0] is not None and others[0].op_type == "Exp"

    def _is_one(self, tensor: str) -> bool:
        values = self._constants.get(self._source(tensor))
        return values is not None and bool(np.all(array(values) == 1))

    def _node(self, tensor: str, unchanged: frozenset[str] = _UNCHANGED) -> Any | None:
        """The node that computes `tensor`."""
        return self._made.get(self._source(tensor, unchanged))

    def _source(self, tensor: str, unchanged: frozenset[str] = _UNCHANGED) -> str:
        """The earlier tensor that has the values of `tensor`."""
        node = self._made.get(tensor)
        while node is not None and node.op_type in unchanged:
            tensor = node.input[0]
            node = self._made.get(tensor)
        return tensor


# Which outputs have a scale of their own: probabilities, and numbers normalised to -1..1. Their errors are measured
# absolutely: if a picture shows no object, all scores of a detector are close to 0, and rounding is large in
# comparison. The graph or a declaration decides that, not the values: small numbers need not be normalised.


# Their values are within -1..1 for every input.
_BOUNDED = frozenset(
    {"Sigmoid", "HardSigmoid", "Softmax", "Hardmax", "Tanh", "Softsign", "LpNormalization", "Sin", "Cos", "Erf"}
)
# Their values are some of the first input's, or means of these.
_PASSING = _UNCHANGED | frozenset(
    {"Slice", "Gather", "GatherND", "GatherElements", "Split", "Expand", "Tile", "TopK", "Compress", "DepthToSpace"}
    | {"SpaceToDepth", "GlobalAveragePool", "AveragePool", "ReduceMean", "GlobalMaxPool", "MaxPool", "ReduceMax"}
    | {"ReduceMin", "Neg", "Abs"}
)
# Their values are some of any input's, or products of all.
_ALL = frozenset({"Concat", "Mul", "Max", "Min"})


def normalised_outputs(graph: Path, spec: ModelSpec, reference: Rows) -> frozenset[str]:
    """The float outputs that the graph bounds by -1..1, or that are declared as probabilities or as relative boxes.

    `reference` are the original's answers, which must be within these bounds as well.
    """
    reader = _RangeReader(onnx.load(str(graph), load_external_data=False).graph)
    declared = declared_shares(spec)
    if spec.detection is not None and spec.detection.are_fractions:
        declared |= {spec.detection.boxes}
    return frozenset(
        name
        for name, values in reference.items()
        if values.dtype.kind == "f" and _is_within(values) and (name in declared or reader.is_bounded(name))
    )


def declared_shares(spec: ModelSpec) -> frozenset[str]:
    """The outputs whose values are probabilities, by the task."""
    if spec.activation != "none":
        return frozenset()
    if spec.detection is not None:
        return frozenset({spec.detection.scores} if spec.detection.scores is not None else ())
    return frozenset({spec.outputs[0].name} if spec.gives_classes else ())


def _is_within(values: np.ndarray) -> bool:
    return bool((np.abs(values.astype(np.float64)) <= 1 + 1e-3).all())


class _RangeReader(_GraphReader):
    def __init__(self, graph: Any) -> None:
        super().__init__(graph)
        self._known: dict[str, bool] = {}

    def is_bounded(self, tensor: str, steps: int = 200) -> bool:
        """Whether the known operators bound the values by -1..1."""
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
            # The second output of these two has indices.
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
        """Whether `total` is the sum or the norm of `value`, kept above zero, over a whole row."""
        node = self._made.get(total)
        while node is not None and node.op_type in ("Expand", "Clip", "Max", "Identity", "Add", "Unsqueeze", "Reshape"):
            node = self._made.get(node.input[0])
        if node is None:
            return False
        if node.op_type == "Sqrt":
            inner = self._made.get(node.input[0])
            return inner is not None and inner.op_type in ("ReduceSum", "ReduceSumSquare", "Add", "Clip")
        if node.op_type in ("ReduceL2", "ReduceL1"):
            return bool(node.input[0] == value)
        powers = self._made.get(value)
        return node.op_type == "ReduceSum" and node.input[0] == value and powers is not None and powers.op_type == "Exp"

    def _is_small(self, name: str) -> bool:
        constant = self._constants.get(name)
        if constant is None or constant.external_data:
            return False
        values = array(constant)
        return values.dtype.kind == "f" and bool((np.abs(values) <= 1).all())
