"""The rules of `convoy.export.variants.pairs`, held against a file. Knows graphs; judges the placement alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from convoy.export.variants.onnx_graph import array, consumers, initializers, producers
from convoy.export.variants.pairs import CONVOLUTIONS, PRODUCTS, before_pair


def violations(graph: Any, kept: Collection[str] = ()) -> list[str]:
    """What in a file's placement of quantise-dequantise pairs is against the rules; empty for a sound file.

    The nodes of `kept` were left in higher precision on purpose.
    """
    makers, readers, constants = producers(graph), consumers(graph), initializers(graph)
    found = []
    for node in graph.node:
        if node.op_type == "QuantizeLinear":
            found += _wrong_pair(node, makers, constants)
        elif node.op_type in CONVOLUTIONS | PRODUCTS:
            quantised = [name in makers and makers[name].op_type == "DequantizeLinear" for name in node.input]
            if quantised[2:] == [True]:
                found.append(f"{node.name}: its bias is quantised")
            if quantised[0] != quantised[1]:
                found.append(f"{node.name}: only one of its input and weight is quantised")
        elif node.op_type in ("Relu", "Clip", "BatchNormalization") and before_pair(node.input[0], makers):
            found.append(f"{node.name}: a pair stands between it and what it is fused with")
        elif node.op_type == "Add" and node.name not in kept:
            found += _wrong_addition(node, makers)
    return found + [f"{name}: quantised and never read" for name in _unread(graph, readers)]


def _wrong_pair(node: Any, makers: Mapping[str, Any], constants: Mapping[str, Any]) -> list[str]:
    from onnx import TensorProto

    zero = constants.get(node.input[2]) if len(node.input) > 2 else None
    if zero is None or zero.data_type not in (TensorProto.INT8, TensorProto.FLOAT8E4M3FN) or array(zero).any():
        return [f"{node.name}: not symmetric INT8 or FP8"]
    per_channel = len(constants[node.input[1]].dims) > 0 and constants[node.input[1]].dims[0] > 1
    if per_channel and node.input[0] not in constants:
        return [f"{node.name}: activations are quantised per channel"]
    return []


def _wrong_addition(node: Any, makers: Mapping[str, Any]) -> list[str]:
    """A residual addition behind a quantised convolution has exactly one quantised input, not the convolution's."""
    originals = [before_pair(name, makers) for name in node.input]
    branches = [makers.get(name) for name in node.input]
    fused = [
        branch is not None and branch.op_type in CONVOLUTIONS and before_pair(branch.input[0], makers) is not None
        for branch in branches
    ]
    if any(fused) and all(name in makers for name in node.input) and sum(map(bool, originals)) != 1:
        return [f"{node.name}: its skip input is not quantised"]
    if all(originals) and originals:
        return [f"{node.name}: both of its inputs are quantised"]
    return []


def _unread(graph: Any, readers: Mapping[str, list[Any]]) -> list[str]:
    return [node.name for node in graph.node if node.op_type == "DequantizeLinear" and node.output[0] not in readers]
