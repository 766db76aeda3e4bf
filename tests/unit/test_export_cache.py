"""The step cache gives back what was written, and nothing else, whatever happens to its files."""

from __future__ import annotations

import os

import numpy as np
from export_fixtures import fake_torch, make_quick, options, write_images

from convoy.export import command
from convoy.export.cache import StepCache, default_root, step_key
from convoy.export.command import export_bundle
from convoy.export.variants import making as variants
from convoy.models.bundle import open_bundle


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
