"""Steps of an export: each says how far it is, and none is taken again whose inputs are the same."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from export_fixtures import fake_torch, make_quick, options, write_images
from rich.console import Console

from convoy.export import command
from convoy.export.cache import StepCache, default_root, step_key
from convoy.export.command import export_bundle
from convoy.export.terminal import RichProgress
from convoy.export.variants import making as variants
from convoy.export.variants.recover import Ladder
from convoy.models.bundle import open_bundle

# What lasts a second or two, or is another program's, which does not say how far it is.
SHORT = re.compile(r"export from torch|measure this device|publish|write .*")


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
        patch.setattr(command, "to_onnx", fake_torch)
        patch.setattr("convoy.export.profiling.roofline._MATRIX", 64)
        patch.setattr(Ladder, "passes", only_with_a_layer_kept(Ladder.passes))
        command.export_bundle(options(folder, calibrate=data, evaluate=data, precisions="int8"), recorder)
    return recorder.steps


def only_with_a_layer_kept(passes):
    """No file passes as it is, whatever its loss."""
    return lambda ladder, count, caution=0.0: passes(ladder, count, caution) and count >= 1


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
        ("read images", 24),
        ("compare with torch", 3 * 24),  # at batch sizes 1, 3 and 4
        ("is it right at all?", 24),
        ("calibrate", 24),
        ("read samples to try on", 24),
        ("compare ranges int8-cpu", 3 * 24),
        ("try int8-cpu", 24),
        ("try int8-cpu, 1 kept", 24),
        ("try int8-trt", 24),
        ("measure accuracy", 24),
        ("measure latency", 3),  # batch sizes
    ],
)
def test_the_long_ones_have_a_unit_that_lasts_no_longer_than_a_moment(steps, name, units):
    found = [step for step in steps if step.name == name]
    assert found, [step.name for step in steps]
    assert {step.total for step in found} == {units}


def test_a_total_that_is_known_late_is_shown(tmp_path):
    console = Console(file=io.StringIO(), width=80, force_terminal=True, no_color=True)
    with RichProgress(console) as progress, progress.step("read images") as step:
        step.expect(512)
        step.advance(512)
    assert "512/512" in console.file.getvalue()  # type: ignore[attr-defined]


def test_what_was_written_comes_back(tmp_path):
    cache = StepCache(tmp_path / "cache")
    assert cache.read("key") is None
    cache.write("key", b"result")
    assert cache.read("key") == b"result"
    cache.write_arrays("arrays", {"a": np.arange(3)})
    found = cache.read_arrays("arrays")
    assert found["a"].tolist() == [0, 1, 2]


def test_a_broken_entry_is_ignored_and_removed(tmp_path):
    cache = StepCache(tmp_path)
    for broken in (b"", b"short", b"x" * 100):
        cache.write("key", b"result")
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
    monkeypatch.setattr(command, "to_onnx", fake_torch)
    data = str(write_images(tmp_path / "photos"))
    cache, counts = StepCache(tmp_path / "cache"), {"collect": 0}

    def counting(*arguments):
        counts["collect"] += 1
        return real(*arguments)

    real = variants.collect
    monkeypatch.setattr(variants, "collect", counting)
    call = options(tmp_path, calibrate=data, evaluate=data)
    first = open_bundle(export_bundle(call, cache=cache)).manifest
    second = open_bundle(export_bundle(call, cache=cache)).manifest
    assert counts["collect"] == 1
    assert [v.accuracy for v in first.variants] == [v.accuracy for v in second.variants]
    (tmp_path / "photos" / "calibration" / "red" / "0.png").unlink()
    export_bundle(call, cache=cache)
    assert counts["collect"] == 2
