"""What the end of a graph says of its outputs: probabilities, their logarithms, sigmoids, or numbers without bounds.

Walks back from the output through what changes no value (Identity, Reshape, Flatten, ...) and knows the spellings of
softmax, log-softmax and sigmoid that exporters and people write. Looks at operators only: whether the outputs are what
their operators promise is for `convoy.export.proof.activation` to check, so that a spelling is taken on a likeness.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx

from convoy.export.variants.onnx_graph import array, constants, producers

# "unbounded": nothing limits the values, as behind a linear layer. "clipped": cut off at a bound, which may or may not
# be meant as a probability's. "derived": calculated from probabilities or their logarithms, as percent are, so that no
# values make logits of them. "unknown": these operators say nothing.
Kind = Literal["softmax", "log_softmax", "sigmoid", "unbounded", "clipped", "derived", "unknown"]

_UNCHANGED = frozenset({"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Cast", "Dropout", "Transpose"})
_REPEATED = _UNCHANGED | {"Expand", "Tile"}
_LINEAR = frozenset({"Gemm", "MatMul", "Conv", "ConvTranspose", "BatchNormalization", "Einsum"})
_RECTIFIERS = frozenset(
    {"Relu", "LeakyRelu", "PRelu", "Elu", "Selu", "Celu", "Softplus", "ThresholdedRelu", "Gelu", "HardSwish", "Mish"}
)
# The mean of bounded values is bounded likewise, that of others is not; the same for a part of them.
_MEANS_AND_PARTS = frozenset(
    {"GlobalAveragePool", "AveragePool", "ReduceMean", "Slice", "Gather", "GlobalMaxPool", "MaxPool", "ReduceMax"}
)
_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "Neg", "Sum", "Mean", "Concat"})
# Beyond arithmetic, what still makes no logits of probabilities. (A Log of shares, or an Exp of their logarithms, is
# known before.)
_DERIVING = _ARITHMETIC | {"Log", "Exp", "Pow", "Sqrt", "Abs", "Round", "Reciprocal", "ReduceSum", "Where", "Max"}
_OF_PROBABILITIES = frozenset({"softmax", "log_softmax", "sigmoid", "derived"})
_MOST_STEPS = 64


@dataclass(frozen=True, slots=True)
class Ending:
    """`words` names the operators that were recognised, for people."""

    kind: Kind
    words: str


def read_ending(path: Path) -> Ending:
    """How the one output of the ONNX file comes to be."""
    return ending_of(onnx.load(str(path), load_external_data=False).graph)


def ending_of(graph: Any) -> Ending:
    """How the graph's first output comes to be."""
    return _EndingReader(graph).read(graph.output[0].name, _MOST_STEPS)


class _EndingReader:
    def __init__(self, graph: Any) -> None:
        self._made: Mapping[str, Any] = producers(graph)
        self._constants = constants(graph)

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
        """Softmax, log-softmax and sigmoid as arithmetic."""
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
        """Sums, differences and multiples of what has no bounds have none; those of probabilities are derived."""
        if node.op_type in _DERIVING:
            derived = self._derived(node, steps)
            if derived is not None:
                return derived
        if node.op_type not in _ARITHMETIC:
            return None
        parts = self._parts(node, steps)
        if parts and all(part.kind == "unbounded" for part in parts):
            if node.op_type == "Neg" and self._is(node.input[0], "Softplus"):
                return Ending("derived", "the logarithm of a sigmoid")  # -log(1 + exp(-x))
            return Ending("unbounded", f"{parts[0].words}, {node.op_type}")
        return None

    def _derived(self, node: Any, steps: int) -> Ending | None:
        parts = self._parts(node, steps)
        of_probabilities = [part for part in parts if part.kind in _OF_PROBABILITIES]
        # A product of those and of something else, as x * sigmoid(x), is as free as the other factor.
        if not of_probabilities or (node.op_type == "Mul" and len(of_probabilities) < len(parts)):
            return None
        return Ending("derived", f"{of_probabilities[0].words}, {node.op_type}")

    def _parts(self, node: Any, steps: int) -> list[Ending]:
        return [self.read(name, steps - 1) for name in node.input if name and not self._is_constant(name)]

    def _is(self, tensor: str, kind: str) -> bool:
        node = self._node(tensor)
        return node is not None and node.op_type == kind

    def _is_share(self, value: str, total: str) -> bool:
        """Whether `total` is the sum of `value`."""
        summed = self._node(total, _REPEATED)
        if summed is None or summed.op_type not in ("ReduceSum", "ReduceL1"):
            return False
        return self._source(summed.input[0]) == self._source(value)

    def _is_log_of_sum(self, tensor: str, steps: int) -> bool:
        """log(sum(exp(...))), perhaps with the largest value, which was taken out before, added again."""
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

    def _is_constant(self, tensor: str) -> bool:
        return self._source(tensor) in self._constants

    def _node(self, tensor: str, unchanged: frozenset[str] = _UNCHANGED) -> Any | None:
        """Who makes the values of `tensor`."""
        return self._made.get(self._source(tensor, unchanged))

    def _source(self, tensor: str, unchanged: frozenset[str] = _UNCHANGED) -> str:
        """The tensor whose values `tensor` has, further up."""
        node = self._made.get(tensor)
        while node is not None and node.op_type in unchanged:
            tensor = node.input[0]
            node = self._made.get(tensor)
        return tensor
