"""Make the variants: balance channels, choose the best ranges, and keep layers in higher precision where 8 bits hurt.

The quality of a file is estimated on the calibration images alone (`convoy.export.variants.recover`). Whether it may
serve is decided elsewhere, on unseen images. Each file is audited: how much of it runs in which precision.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import onnx

from convoy.app.engines.onnx_session import new_session, session_options
from convoy.app.engines.openvino import layers_in_8_bits
from convoy.export.cache import StepCache, step_key
from convoy.export.data import SampleSet
from convoy.export.plan import MethodChoice
from convoy.export.profiling.roofline import multiply_adds
from convoy.export.progress import Progress
from convoy.export.proof.judging import Judge
from convoy.export.sources.torch_job import one_line
from convoy.export.variants.calibrate import METHODS, Calibration, Conversion, Method, Ranges, collect, drift_of
from convoy.export.variants.equalize import Levels, channels_of, equalize, level_inputs, measure_levels, read_channels
from convoy.export.variants.onnx_graph import prepare, producers
from convoy.export.variants.precision import INT8_CPU, REFERENCE, Recipe
from convoy.export.variants.quantize import layers
from convoy.export.variants.recover import (
    Bench,
    Ladder,
    Sensitivity,
    TimeBudget,
    best_method,
    measure_sensitivity,
    ordered,
)
from convoy.export.variants.streams import streams
from convoy.models.bundle import NodeAudit, Target, TradeOff, sha256_file
from convoy.models.errors import JobError
from convoy.models.spec import ModelSpec
from convoy.models.store import disk_errors

_CHUNK_IMAGES = 32


@dataclass(frozen=True, slots=True)
class Made:
    """One variant's file and how it was made. `kept_layers` were found to hurt; rules may keep others.

    `drift` says how the calibration images differ from the evaluation images, if that was checked and found.
    """

    recipe: Recipe
    audit: NodeAudit | None = None
    method: Method | None = None
    kept_layers: int = 0
    trade_offs: tuple[TradeOff, ...] = ()
    drift: str = ""
    search: str = ""


@dataclass
class Maker:
    """Makes variants in `folder`, which has the fp32 graph; `images` are the calibration images."""

    spec: ModelSpec
    folder: Path
    images: SampleSet
    choice: MethodChoice
    budget_points: float
    progress: Progress
    cache: StepCache
    search_budget_s: float = math.inf
    judge: Judge | None = None
    _unprepared: Exception | None = None
    _sensitivities: dict[str, Sensitivity] = field(default_factory=dict)
    _ladders: dict[str, Ladder] = field(default_factory=dict)

    def make(self, recipe: Recipe) -> Made:
        """Write the variant; one of 8 bits keeps as many layers as the calibration images require.

        Raises JobError if it cannot be made.
        """
        if recipe.make is None:
            return Made(recipe)
        if not recipe.has_eight_bits:
            return self._written(Made(recipe), {})
        ladder = self._ladder(recipe)
        count = 0 if ladder.passes(0) else ladder.climb(1)
        # If nothing helps enough, the best of all tries is kept, and the gate judges it.
        return self._kept(recipe, ladder.best() if count is None else count)

    def retry(self, made: Made, caution: float) -> Made | None:
        """Write a variant of 8 bits again with more layers kept, as `Ladder.passes` with `caution` requires.

        Returns None if that is pointless.
        """
        if not made.recipe.has_eight_bits:
            return None
        count = self._ladder(made.recipe).climb(made.kept_layers + 1, caution)
        return None if count is None else self._kept(made.recipe, count)

    def trail(self, recipe: Recipe) -> tuple[TradeOff, ...]:
        """All tries of a variant of 8 bits so far."""
        ladder = self._ladders.get(recipe.file)
        return ladder.trade_offs if ladder else ()

    def drift(self, images: SampleSet) -> str:
        """How these images cause other ranges than the calibration images; empty if they do not."""
        calibration = self._calibrated(REFERENCE)
        fewer = images.thinned(max(2, min(64, self.images.count)))
        with self.progress.step(f"Comparing ranges on {fewer.count} {fewer.kind}", fewer.count) as step:
            found = collect(calibration.graph, fewer.chunks(step, _CHUNK_IMAGES), ["minmax"])
        return drift_of(calibration.ranges["minmax"], found["minmax"])

    def _kept(self, recipe: Recipe, count: int) -> Made:
        ladder = self._ladders[recipe.file]
        made = Made(recipe, None, ladder.method, count, ladder.trade_offs, search=ladder.budget.in_words)
        return self._written(made, ladder.sensitivity().worst(count) if count else {})

    def _written(self, made: Made, kept: Mapping[str, str]) -> Made:
        assert made.recipe.make is not None
        path = self.folder / made.recipe.file
        conversion = Conversion(self._calibrated(made.recipe), made.method or "minmax", frozenset(kept))
        with self.progress.step(f"Writing {made.recipe.file}"), disk_errors(self.folder):
            by_rule = made.recipe.make(conversion, path)
        counts = self._counts if made.recipe.has_eight_bits else None
        return replace(made, audit=audit(path, made.recipe.target, {**by_rule, **kept}, counts))

    @cached_property
    def _counts(self) -> Mapping[str, float]:
        """The multiply-adds of each layer that can be converted to 8 bits."""
        return multiply_adds(self._calibrated(INT8_CPU).graph, self.spec.inputs)

    def _ladder(self, recipe: Recipe) -> Ladder:
        if recipe.file not in self._ladders:
            # Measured before the steps of trying files begin.
            self._calibrated(recipe)
            bench = self._bench
            method = best_method(bench, recipe, self._methods(recipe), self.progress)
            sensitivity = partial(self._sensitive_layers, recipe)
            budget = TimeBudget(self.search_budget_s)
            self._ladders[recipe.file] = Ladder(
                bench, recipe, method, self.budget_points, sensitivity, budget, self.progress
            )
        return self._ladders[recipe.file]

    def _methods(self, recipe: Recipe) -> tuple[Method, ...]:
        """FP8 uses min-max by default: clipping outliers would only gain even smaller floats."""
        if self.choice != "auto":
            return (self.choice,)
        return METHODS if recipe.precision == "int8" else ("minmax",)

    def _sensitive_layers(self, recipe: Recipe) -> Sensitivity:
        """One pass for the INT8 files of ONNX Runtime and TensorRT: the same layers hurt."""
        tried = INT8_CPU if recipe.precision == "int8" and recipe.target != "openvino" else recipe
        if tried.file not in self._sensitivities:
            bench, method = self._bench, self._ladder(tried).method
            step = "sensitivity" if tried is INT8_CPU else f"sensitivity {tried.file}"
            calibration = self._calibrated(tried)
            key = step_key(step, sha256_file(calibration.graph), self.images.key, method)
            counts = self._counts
            # OpenVINO fuses everything between layers with one of them, so it can only be converted together.
            names = [name for name in layers(calibration) if name in counts or tried.target != "openvino"]
            shares = {name: counts.get(name, 0.0) / sum(counts.values()) for name in names}
            kept = self.cache.read(key)
            if kept is None:
                budget = self._ladder(recipe).budget
                found = measure_sensitivity(bench, tried, method, shares, budget, self.progress)
                if not budget.unseen:
                    self.cache.write(key, json.dumps(dict(found.errors)).encode())
            else:
                found = ordered(json.loads(kept), shares)
            self._sensitivities[tried.file] = found
        return self._sensitivities[tried.file]

    @cached_property
    def _bench(self) -> Bench:
        return Bench(self.spec, self._calibrated, self.images, self.folder, self.progress, self.judge)

    def _calibrated(self, recipe: Recipe) -> Calibration:
        """The input of the variant: the prepared fp32 graph, for 8 bits with balanced channels."""
        if not recipe.has_eight_bits:
            return self._plain
        return self._levelled if recipe.target == "openvino" else self._balanced

    @cached_property
    def _plain(self) -> Calibration:
        """The prepared graph and its ranges. What fails for one variant fails for all and is not tried again."""
        if self._unprepared is not None:
            raise self._unprepared
        try:
            with disk_errors(self.folder):
                graph = _prepared(self.folder)
            return Calibration(graph, self._ranges(graph))
        except Exception as error:
            self._unprepared = error
            raise

    @cached_property
    def _balanced(self) -> Calibration:
        graph = self._plain.graph
        levels = self._levels("levels", graph, channels_of(streams(onnx.load(str(graph)).graph)))
        with disk_errors(self.folder):
            return self._changed(*equalize(graph, levels, self.folder / "equalised.onnx"))

    @cached_property
    def _levelled(self) -> Calibration:
        graph = self._plain.graph
        levels = self._levels("levels read", graph, read_channels(onnx.load(str(graph)).graph))
        with disk_errors(self.folder):
            return self._changed(*level_inputs(graph, levels, self.folder / "levelled.onnx"))

    def _changed(self, graph: Path, scaled: tuple[str, ...]) -> Calibration:
        """Measure only what was scaled; all other tensors are bit-identical."""
        if not scaled:
            return self._plain
        again = self._ranges(graph, scaled)
        return Calibration(graph, {method: {**self._plain.ranges[method], **again[method]} for method in METHODS})

    def _levels(self, step_name: str, graph: Path, channels: Mapping[str, int]) -> Levels:
        """The level of each channel of these tensors, from one pass over the images or from the cache."""
        if not channels:
            return {}
        key = step_key(step_name, sha256_file(graph), self.images.key)
        kept = self.cache.read(key)
        if kept is not None:
            return cast(Levels, json.loads(kept))
        with self.progress.step("Measuring channels", self.images.count) as step:
            levels = measure_levels(graph, channels, self.images.chunks(step, _CHUNK_IMAGES))
        self.cache.write(key, json.dumps(levels).encode())
        return levels

    def _ranges(self, graph: Path, tensors: tuple[str, ...] = ()) -> Mapping[Method, Ranges]:
        """The ranges by all methods, of all tensors or these, from one pass over the images or from the cache."""
        key = step_key("ranges", sha256_file(graph), self.images.key, *tensors)
        kept = self.cache.read(key)
        if kept is not None:
            found = json.loads(kept)
            return {method: {name: (low, high) for name, (low, high) in found[method].items()} for method in METHODS}
        with self.progress.step(f"Calibrating on {self.images.count} {self.images.kind}", self.images.count) as step:
            ranges = collect(graph, self.images.chunks(step, _CHUNK_IMAGES), METHODS, tensors or None)
        self.cache.write(key, json.dumps(ranges).encode())
        return ranges


def _prepared(folder: Path) -> Path:
    try:
        return prepare(folder / REFERENCE.file, folder / "prepared.onnx")
    except OSError:
        raise
    except Exception as error:  # onnxruntime's and onnx's errors share no base class
        raise JobError(f"only fp32 can be made from this network ({one_line(str(error))})") from error


# The audit: what of a file really runs in 8, 16 or 32 bits. A quantise-dequantise pair that was not fused leaves the
# layer in float, and the file no faster. So the optimised graph is read, not the written one, if the runtime optimises
# for the variant's own device; a variant for another device is counted as written.


# These change the form of a value, not the value.
_CONVERSIONS = frozenset({"QuantizeLinear", "DequantizeLinear", "Cast", "ReorderInput", "ReorderOutput"})
_MOVES = frozenset(
    {"Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Concat", "Split", "Gather"}
    | {"Identity", "Shape"}
)
_ONNX_NAMES = {
    1: "fp32",
    2: "int8",
    3: "int8",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "fp16",
    11: "fp64",
    16: "bf16",
    17: "fp8",
}
_COMPUTING = frozenset({"int8", "fp8", "fp16", "fp32", "fp64", "bf16"})


def audit(
    path: Path, target: Target, kept: Mapping[str, str], multiply_adds: Mapping[str, float] | None = None
) -> NodeAudit:
    """Counts of computing nodes by precision; conversions between precisions count as "conversion".

    With `multiply_adds` of the float graph's nodes, the share done in 8 bits is counted, too.
    """
    if target == "cpu":
        with tempfile.TemporaryDirectory(prefix="convoy-audit-") as folder:
            graph = _optimised(path, Path(folder) / "optimised.onnx")
    else:
        graph = onnx.load(str(path)).graph
    share = _share(path, target, multiply_adds) if multiply_adds else None
    return NodeAudit(dict(sorted(count_nodes(graph).items())), dict(kept), share)


def _share(path: Path, target: Target, multiply_adds: Mapping[str, float]) -> float:
    """The share of multiply-adds in layers of 8 bits: as OpenVINO has compiled them, for others as the file says.

    The graph that ONNX Runtime has optimised has other names.
    """
    graph = onnx.load(str(path)).graph
    if target == "openvino":
        known = layers_in_8_bits(path)
        in_eight = {node.name for node in graph.node if known & {node.name, *node.output}}
    else:
        makers = producers(graph)
        in_eight = {node.name for node in graph.node if _eight_bits(node, makers, {})}
    return sum(count for name, count in multiply_adds.items() if name in in_eight) / sum(multiply_adds.values())


def _optimised(path: Path, aside: Path) -> Any:
    options = session_options()
    options.optimized_model_filepath = str(aside)
    new_session(path, options)
    return onnx.load(str(aside)).graph


def count_nodes(graph: Any) -> Counter[str]:
    """How many nodes compute in which precision, and how many only convert.

    A node computes in the type of its first input. A layer behind dequantisations of both input and weight counts as 8
    bits, because TensorRT makes an 8-bit kernel of it.
    """
    types = {tensor.name: _ONNX_NAMES.get(tensor.data_type, "other") for tensor in graph.initializer}
    for tensor in (*graph.input, *graph.value_info):
        types[tensor.name] = _ONNX_NAMES.get(tensor.type.tensor_type.elem_type, "other")
    makers = producers(graph)
    found: Counter[str] = Counter()
    for node in graph.node:
        first = types.get(node.input[0], "other") if node.input else "other"
        for output in node.output:
            types.setdefault(output, _result(node, first, types))
        if node.op_type in _CONVERSIONS:
            found["conversion"] += 1
            continue
        if node.op_type in _MOVES:
            continue
        precision = _eight_bits(node, makers, types) or _bf16(node, makers, types) or first
        if precision in _COMPUTING:
            found[precision] += 1
    return found


def _bf16(node: Any, makers: Mapping[str, Any], types: Mapping[str, str]) -> str:
    """BF16 if the weight is cast from it, which is how OpenVINO then computes the layer."""
    casts = [makers[name] for name in node.input[1:2] if name in makers and makers[name].op_type == "Cast"]
    return "bf16" if casts and types.get(casts[0].input[0]) == "bf16" else ""


def _eight_bits(node: Any, makers: Mapping[str, Any], types: Mapping[str, str]) -> str:
    """The 8-bit type that a layer computes in; empty if it does not."""
    if node.op_type.startswith("QLinear") or node.op_type in ("QGemm", "ConvInteger", "MatMulInteger"):
        return "int8"
    pairs = [makers[name] for name in node.input[:2] if name in makers and makers[name].op_type == "DequantizeLinear"]
    if len(pairs) < 2:
        return ""
    return "fp8" if types.get(pairs[0].input[0]) == "fp8" else "int8"


def _result(node: Any, first: str, types: Mapping[str, str]) -> str:
    if node.op_type == "Cast":
        return next(_ONNX_NAMES.get(a.i, "other") for a in node.attribute if a.name == "to")
    if node.op_type == "QuantizeLinear":
        return "fp8" if types.get(node.input[-1]) == "fp8" else "int8"
    if node.op_type == "DequantizeLinear":
        return types.get(node.input[1], "fp32")
    if node.op_type == "QGemm":
        # Without a scale for its result, its eighth input, it outputs floats.
        return "int8" if len(node.input) > 7 and node.input[7] else "fp32"
    return first
