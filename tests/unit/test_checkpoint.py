"""The file that training leaves: complete or not there, and clear about what it is not."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convoy.models.checkpoint import (
    CheckpointHeader,
    PartRecord,
    read_checkpoint_header,
    refuse_unwritable,
    write_checkpoint,
)
from convoy.models.errors import JobError
from convoy.models.spec import ImageSpec

IMAGE = ImageSpec(32, 32, 3, "exact", 32, "bilinear", True, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "uint8_nhwc")
HEADER = CheckpointHeader(
    architecture="simple_cnn",
    labels=("cat", "dög"),
    image=IMAGE,
    dataset="digits",
    split={
        "train": PartRecord(70, "a" * 64),
        "calibration": PartRecord(10, "b" * 64),
        "test": PartRecord(20, "c" * 64),
    },
    convoy_version="0.1.0",
    seed=3,
    test_accuracy=0.99,
)
WEIGHTS = {"conv.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "steps": np.array(7)}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cnn.safetensors"
    write_checkpoint(path, WEIGHTS, HEADER)
    assert read_checkpoint_header(path) == HEADER
    weights = load_file(path)
    assert all(np.array_equal(weights[name], array) for name, array in WEIGHTS.items())
    assert [entry.name for entry in tmp_path.iterdir()] == ["cnn.safetensors"]


def test_the_file_gets_the_rights_that_any_new_file_gets(tmp_path: Path) -> None:
    path = tmp_path / "cnn.safetensors"
    write_checkpoint(path, WEIGHTS, HEADER)
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_weights_from_elsewhere_have_no_header(tmp_path: Path) -> None:
    save_file({"w": np.zeros(2, np.float32)}, tmp_path / "bare.safetensors")
    save_file({"w": np.zeros(2, np.float32)}, tmp_path / "timm.safetensors", {"format": "pt"})
    assert read_checkpoint_header(tmp_path / "bare.safetensors") is None
    assert read_checkpoint_header(tmp_path / "timm.safetensors") is None


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"no checkpoint at .*; check the path, or run `convoy train`"):
        read_checkpoint_header(tmp_path / "gone.safetensors")


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04" + b"x" * 100, b"\xff" * 64])
def test_another_kind_of_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cnn.safetensors"
    path.write_bytes(content)
    with pytest.raises(JobError, match=r"cannot read .* as safetensors") as caught:
        read_checkpoint_header(path)
    assert "\n" not in str(caught.value)


def test_a_cut_off_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "cnn.safetensors"
    write_checkpoint(path, WEIGHTS, HEADER)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(JobError, match="cannot read"):
        read_checkpoint_header(path)


def test_a_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="cannot read"):
        read_checkpoint_header(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"schema": 99}', '{"schema": 1, "image": {"height": 0}, "split": {}}']
)
def test_a_broken_header_of_ours_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cnn.safetensors"
    save_file({"w": np.zeros(2, np.float32)}, path, {"convoy": text})
    with pytest.raises(JobError, match=r"header of .* is broken .*; train again"):
        read_checkpoint_header(path)


def test_a_header_with_an_impossible_image_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "cnn.safetensors"
    write_checkpoint(path, WEIGHTS, HEADER)
    tampered = json.loads(metadata(path))
    tampered["image"]["std"] = [0, 0, 0]
    save_file(WEIGHTS, path, {"convoy": json.dumps(tampered)})
    with pytest.raises(JobError, match="std must be above 0"):
        read_checkpoint_header(path)


def metadata(path: Path) -> str:
    size = int.from_bytes(path.read_bytes()[:8], "little")
    text: str = json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"]["convoy"]
    return text


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_a_full_disk_or_an_interrupt_leaves_the_file_before_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "cnn.safetensors"
    write_checkpoint(path, WEIGHTS, HEADER)

    def fail(descriptor: int) -> Any:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises((JobError, KeyboardInterrupt)) as caught:
        write_checkpoint(path, WEIGHTS, replace(HEADER, seed=4))
    if isinstance(error, OSError):
        assert (
            str(caught.value)
            == f"cannot write {path}: No space left on device; free space there or choose another place"
        )
    assert read_checkpoint_header(path) == HEADER
    assert [entry.name for entry in tmp_path.iterdir()] == ["cnn.safetensors"]


def test_a_place_that_takes_no_file_is_refused_before_the_work(tmp_path: Path) -> None:
    refuse_unwritable(tmp_path / "cnn.safetensors")
    with pytest.raises(JobError, match=r"no folder .*gone to write cnn.safetensors into; make it first"):
        refuse_unwritable(tmp_path / "gone" / "cnn.safetensors")
    with pytest.raises(JobError, match="is a folder; name a file in it"):
        refuse_unwritable(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match=r"file is a file, where a folder for cnn\.safetensors is needed"):
        refuse_unwritable(tmp_path / "file" / "cnn.safetensors")
