"""The search for layers to keep, how far each step of an export is, and what is not done twice."""

from __future__ import annotations

import dataclasses
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from export_fixtures import IMAGE, SIZE_PX, make_quick, options, save_graph, write_images
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console

from convoy.export import command
from convoy.export.cache import StepCache, default_root, step_key
from convoy.export.command import export_bundle
from convoy.export.data import ImageSet
from convoy.export.progress import SILENT, Step
from convoy.export.terminal import RichProgress
from convoy.export.variants import making as variants
from convoy.export.variants.calibrate import METHODS, Method
from convoy.export.variants.making import Maker
from convoy.export.variants.onnx_graph import array, initializers
from convoy.export.variants.precision import INT8_CPU, RECIPES, REFERENCE, Recipe
from convoy.export.variants.recover import (
    Bench,
    Ladder,
    Sensitivity,
    TimeBudget,
    Trial,
    best_method,
    measure_sensitivity,
    ordered,
)
from convoy.models.bundle import Accuracy, open_bundle
from convoy.models.datasets import load
from convoy.models.spec import ModelSpec, TensorSpec

LAYERS = tuple((f"layer{index}", 1 / (index + 1)) for index in range(20))


class FakeBench:
    """Files whose loss depends on the number of layers kept only; counts what was tried."""

    def __init__(self, loss: Callable[[int], float], agreement: float = 1.0) -> None:
        self.loss, self.agreement = loss, agreement
        self.tried: list[int] = []

    count = 200

    def try_out(self, recipe: Recipe, method: str, keep: frozenset[str], *, step: Step, is_timed: bool) -> Trial:
        self.tried.append(len(keep))
        assert keep == {name for name, _ in LAYERS[: len(keep)]}
        points = self.loss(len(keep))
        return Trial(Accuracy(200, 0.9, self.agreement, points), 0.0, 1.0, {})


def ladder(bench: FakeBench) -> Ladder:
    return Ladder(cast(Bench, bench), INT8_CPU, "minmax", 1.0, lambda: Sensitivity(LAYERS))


@pytest.mark.parametrize("enough", range(1, 20))
def test_the_smallest_number_of_kept_layers_is_found(enough):
    bench = FakeBench(lambda kept: 0.5 if kept >= enough else 50.0)
    found = ladder(bench)
    assert found.climb(1) == enough
    assert len(bench.tried) == len(set(bench.tried)) <= 9
    assert [step.layers_kept for step in found.trade_offs] == sorted(bench.tried)


def test_half_of_the_multiply_adds_are_the_most_that_is_kept():
    bench = FakeBench(lambda kept: 0.5 if kept >= 16 else 50.0)
    # The first four have none.
    shares = {name: 1 / 16 for name, _ in LAYERS[4:]}
    found = dataclasses.replace(ladder(bench), sensitivity=lambda: Sensitivity(LAYERS, shares))
    assert found.climb(1) is None
    assert max(bench.tried) == 12


def test_layers_are_kept_by_their_error_for_what_they_multiply_and_add():
    errors = {"product": 0.0, "sigmoid": 0.1, "pointwise": 0.2, "depthwise": 0.2, "quiet": 0.001}
    shares = {"pointwise": 0.8, "depthwise": 0.05, "quiet": 0.15}
    assert [name for name, _ in ordered(errors, shares).errors] == [
        "sigmoid",
        "depthwise",
        "pointwise",
        "quiet",
        "product",
    ]


def test_the_search_ends_when_its_time_is_up_with_the_cheapest_layers_looked_at():
    looked: list[str] = []

    class Slow:
        def try_out(self, recipe: Recipe, method: Method, *, only: frozenset[str]) -> Trial:
            looked.extend(only)
            return Trial(Accuracy(200, 0.9, 1.0, 0.0), 0.1, 1.0, {})

    budget = TimeBudget(25, lambda: 10.0 * len(looked))  # ten seconds for each
    shares = {"large": 0.7, "small": 0.1, "middle": 0.2, "none": 0.0}
    with budget:
        found = measure_sensitivity(cast(Bench, Slow()), INT8_CPU, "minmax", shares, budget, SILENT)
    assert looked == ["none", "small", "middle"]
    assert {name for name, _ in found.errors} == set(looked)
    assert budget.in_words == "the search for layers to keep took 30 s of 25 s, 1 layers were not tested"


def test_where_nothing_is_enough_the_best_that_was_tried_is_known():
    found = ladder(FakeBench(lambda kept: {0: 60.0, 4: 12.0, 8: 12.0}.get(kept, 30.0)))
    assert not found.passes(0)
    assert found.climb(1) is None
    assert found.best() == 4


def test_caution_takes_a_loss_for_higher_than_it_was_measured():
    # One standard error of 198 images of 200 that agree is 0.7 points.
    found = ladder(FakeBench(lambda kept: 0.6 if kept < 8 else 0.0, agreement=0.99))
    assert found.climb(1) == 1
    assert found.climb(2, caution=1.0) == 8


@pytest.mark.parametrize(
    ("disagreements", "errors", "best"),
    [
        # One image more is chance, and the smaller error counts; six are not.
        ((0, 6, 1), (0.03, 0.01, 0.02), "percentile"),
        ((0, 6, 2), (0.03, 0.01, 0.02), "minmax"),
        ((3, 6, 9), (0.03, 0.02, 0.01), "entropy"),
        ((180, 180, 180), (1.1, 1.0, 0.9), "percentile"),
    ],
)
def test_the_best_ranges_agree_most_often_and_by_the_smallest_error(disagreements, errors, best):
    found = dict(zip(METHODS, zip(disagreements, errors, strict=True), strict=True))

    class Found:
        count = 200

        def try_out(self, recipe: Recipe, method: Method, *, step: Step) -> Trial:
            count, error = found[method]
            return Trial(Accuracy(200, 0.9, 1 - count / 200, 0.0), error, 1.0, {})

    assert best_method(cast(Bench, Found()), INT8_CPU, METHODS, SILENT) == best


def lopsided(path: Path, *, clipped: bool, channels: int = 3, quiet: float = 1.0) -> Path:
    """uint8 [N, 8, 8, 3] -> logits of blue and red [N, 2], through a tensor whose third channel drowns the others.

    The clip never clips, but that is not known of it, so that channels cannot be balanced across it. `quiet` is how
    much is left of the others; of more than three `channels` the rest is zero.
    """

    def padded(values: list[list[float]], shape: tuple[int, ...]) -> np.ndarray:
        found = np.zeros(shape)
        found[: len(values), : len(values[0])] = values
        return found

    clip = helper.make_node("Clip", ["a", "low", "high"], ["b"], "clip")
    constants: Mapping[str, np.ndarray] = {
        "scale": np.full((1, 3, 1, 1), 1 / 255),
        "shift": np.zeros((1, 3, 1, 1)),
        "wide.w": padded([[0, 0, quiet], [quiet, 0, 0], [0, 1e4, 0]], (channels, 3))[..., None, None],
        "low": np.array(-1e9),
        "high": np.array(1e9),
        "narrow.w": padded(
            [[1 / quiet, 0, 1e-6], [0, 1 / quiet, 1e-6], [1 / quiet, 1 / quiet, 1e-6]], (channels, channels)
        )[..., None, None],
        "calm.w": np.eye(channels)[..., None, None],
        "calmer.w": np.eye(channels)[..., None, None],
        "head.w": padded([[1, 0, 0], [0, 1, 0]], (2, channels)),
    }
    nodes = [
        helper.make_node("Transpose", ["images"], ["nchw"], "transpose", perm=[0, 3, 1, 2]),
        helper.make_node("Cast", ["nchw"], ["float"], "cast", to=TensorProto.FLOAT),
        helper.make_node("Mul", ["float", "scale"], ["scaled"], "mul"),
        helper.make_node("Add", ["scaled", "shift"], ["normalised"], "add"),
        helper.make_node("Conv", ["normalised", "wide.w"], ["a"], "wide"),
        clip if clipped else helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("Conv", ["b", "narrow.w"], ["c"], "narrow"),
        # They hurt nothing, so that half of the multiply-adds can be in 8 bits.
        helper.make_node("Conv", ["c", "calm.w"], ["d"], "calm"),
        helper.make_node("Conv", ["d", "calmer.w"], ["e"], "calmer"),
        helper.make_node("GlobalAveragePool", ["e"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "head.w"], ["logits"], "head", transB=1),
    ]
    return save_graph(
        path,
        nodes,
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["batch", SIZE_PX, SIZE_PX, 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 2])],
        [numpy_helper.from_array(values.astype(np.float32), name) for name, values in constants.items()],
    )


def maker(folder: Path, *, clipped: bool, channels: int = 3, quiet: float = 1.0) -> Maker:
    lopsided(folder / REFERENCE.file, clipped=clipped, channels=channels, quiet=quiet)
    data = load(str(write_images(folder / "images")))
    assert data.labels == ("blue", "red")
    images = ImageSet("images", tuple(data.part("calibration")), IMAGE, data.labels)
    spec = ModelSpec(
        name="lopsided",
        inputs=(TensorSpec("images", "UINT8", (SIZE_PX, SIZE_PX, 3)),),
        outputs=(TensorSpec("logits", "FP32", (2,)),),
        max_batch_size=8,
        image=IMAGE,
        activation="softmax",
        labels=data.labels,
    )
    return Maker(spec, folder, images, "minmax", 1.0, SILENT, StepCache(folder / "cache"))


def test_a_network_that_cannot_be_balanced_keeps_the_layers_that_hurt(tmp_path):
    made = maker(tmp_path, clipped=True).make(INT8_CPU)
    assert made.trade_offs[0].layers_kept == 0
    assert made.trade_offs[0].accuracy.loss_points > 10
    assert made.kept_layers in (1, 2)
    assert made.audit.eight_bit_share is not None
    assert 0 < made.audit.eight_bit_share < 1
    assert made.search.startswith("the search for layers to keep took ")
    assert set(made.audit.kept) <= {"wide", "narrow"}
    assert all(reason.startswith("alone moves the answers by") for reason in made.audit.kept.values())


def test_fp8_has_its_own_ladder_for_what_even_floats_are_too_coarse_for(tmp_path):
    (fp8,) = (recipe for recipe in RECIPES if recipe.precision == "fp8")
    making = maker(tmp_path, clipped=True, channels=16, quiet=1e-3)
    made = dataclasses.replace(making, choice="auto").make(fp8)
    assert made.method == "minmax"
    assert [step.layers_kept for step in made.trade_offs] == [0, 1]
    assert made.trade_offs[0].accuracy.loss_points > 10
    assert made.audit.kept["narrow"].startswith("alone moves the answers by")
    assert made.audit.by_precision["fp8"] == 2


def test_a_network_that_can_be_balanced_keeps_none_and_its_fp16_file_is_as_it_was(tmp_path):
    making = maker(tmp_path, clipped=False)
    for recipe in RECIPES:
        made = making.make(recipe)
        assert made.kept_layers == 0
        if recipe is INT8_CPU:
            assert made.audit.share_in_words == "100 % of multiply-adds in 8 bits"
            assert made.search == ""
        if recipe.precision == "int8":
            assert [(step.layers_kept, step.accuracy.loss_points) for step in made.trade_offs] == [(0, 0.0)]
    half = constants(tmp_path / "fp16.onnx")
    for name, values in constants(tmp_path / "prepared.onnx").items():
        assert np.array_equal(half[name].astype(np.float32), values.astype(half[name].dtype).astype(np.float32))
    assert not np.array_equal(*(constants(tmp_path / f"{kind}.onnx")["wide.w"] for kind in ("prepared", "equalised")))


def constants(path: Path) -> dict[str, np.ndarray]:
    return {name: array(tensor) for name, tensor in initializers(onnx.load(path).graph).items()}


# What lasts a second or two, or is another program's, which does not say how far it is.
SHORT = re.compile(r"Exporting from PyTorch|Measuring this device|Publishing|Writing .*")


@dataclass
class RecordedStep:
    name: str
    total: int | None
    advances: list[int] = field(default_factory=list)
    is_open: bool = True

    def advance(self, count: int = 1) -> None:
        assert self.is_open
        self.advances.append(count)

    def expect(self, total: int) -> None:
        self.total = total


class Recorder:
    """A `Progress` that keeps all that it is told."""

    def __init__(self) -> None:
        self.steps: list[RecordedStep] = []

    def say(self, line: str) -> None:
        pass

    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[RecordedStep]:
        assert not [one.name for one in self.steps if one.is_open], "two steps at once"
        self.steps.append(RecordedStep(name, total))
        yield self.steps[-1]
        self.steps[-1].is_open = False


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> list[RecordedStep]:
    """Of an export in which one layer has to be kept in higher precision."""
    folder, recorder = tmp_path_factory.mktemp("export"), Recorder()
    data = str(write_images(folder / "images"))
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        passes = Ladder.passes  # no file does as it is, whatever its loss
        patch.setattr(
            Ladder, "passes", lambda ladder, count, caution=0.0: passes(ladder, count, caution) and count >= 1
        )
        command.export_bundle(options(folder, calibrate=data, evaluate=data, precisions="int8"), recorder)
    return recorder.steps


def test_all_units_of_every_long_step_are_told(steps):
    for step in steps:
        if SHORT.fullmatch(step.name):
            continue
        assert step.total, step.name
        assert sum(step.advances) == step.total, step.name
        assert not step.is_open


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("Reading images", 24),
        ("Comparing with torch", 3 * 24),  # at batch sizes 1, 3 and 4
        ("Measuring accuracy of fp32 on 24 images", 24),
        ("Calibrating on 24 images", 24),
        ("Reading 24 images to test variants on", 24),
        ("Choosing ranges for int8-cpu", 3 * 24),
        ("Testing int8-cpu", 24),
        ("Testing int8-cpu with 1 layer kept", 24),
        ("Testing int8-trt", 24),
        ("Measuring accuracy on 24 images", 24),
        ("Measuring latency", 3),  # batch sizes
    ],
)
def test_the_long_ones_have_a_unit_that_lasts_no_longer_than_a_moment(steps, name, units):
    found = [step for step in steps if step.name == name]
    assert found, [step.name for step in steps]
    assert {step.total for step in found} == {units}


def test_a_total_that_is_known_late_is_shown(tmp_path):
    console = Console(file=io.StringIO(), width=80, force_terminal=True, no_color=True)
    with RichProgress(console) as progress, progress.step("Reading images") as step:
        step.expect(512)
        step.advance(512)
    assert "512/512" in console.file.getvalue()  # type: ignore[attr-defined]


def test_what_was_written_comes_back_unless_it_is_broken(tmp_path):
    cache = StepCache(tmp_path)
    assert cache.read("key") is None
    cache.write_arrays("arrays", {"a": np.arange(3)})
    assert cache.read_arrays("arrays")["a"].tolist() == [0, 1, 2]
    for broken in (b"", b"short", b"x" * 100):
        cache.write("key", b"result")
        assert cache.read("key") == b"result"
        (tmp_path / "key").write_bytes(broken)
        assert cache.read("key") is None
        assert not (tmp_path / "key").exists()


def test_the_least_recently_used_goes_first(tmp_path):
    cache = StepCache(tmp_path, limit_bytes=400)
    for index, name in enumerate(("old", "used", "new")):
        cache.write(name, bytes(100))
        os.utime(tmp_path / name, (index, index))
    cache.read("old")
    cache.write("newest", bytes(100))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "newest", "old"]
    cache.write("huge", bytes(300))
    assert cache.read("huge") is None


def test_keys_tell_their_inputs_apart(monkeypatch):
    assert step_key("a", "b", "c") != step_key("a", "bc")
    assert step_key("a", "b") == step_key("a", "b")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(default_root()) == "/somewhere/convoy/export"


def test_a_second_export_takes_no_step_again_whose_inputs_are_the_same(tmp_path, monkeypatch):
    make_quick(monkeypatch)
    data = str(write_images(tmp_path / "photos"))
    cache, collect = StepCache(tmp_path / "cache"), Mock(wraps=variants.collect)
    monkeypatch.setattr(variants, "collect", collect)
    call = options(tmp_path, calibrate=data, evaluate=data)
    first = open_bundle(export_bundle(call, cache=cache)).manifest
    second = open_bundle(export_bundle(call, cache=cache)).manifest
    assert collect.call_count == 1
    assert [v.accuracy for v in first.variants] == [v.accuracy for v in second.variants]
    (tmp_path / "photos" / "calibration" / "red" / "0.png").unlink()
    export_bundle(call, cache=cache)
    assert collect.call_count == 2
