"""The checkpoint of `convoy train`: weights in safetensors, with everything needed to use them in the header.

Knows nothing of torch or training. The header's metadata has one entry of ours, `convoy`, a JSON object; files without
it are read as other people's weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from convoy.models.errors import BundleError, JobError
from convoy.models.files import replace_file
from convoy.models.records import from_jsonable
from convoy.models.spec import Activation, ImageSpec
from convoy.models.tasks import DetectionOutputs, Task

_KEY = "convoy"
_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class PartRecord:
    """One part of the split: its number of images, and the hash over all of them."""

    images: int
    sha256: str


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """How the weights were trained. `epochs` were planned and `epochs_done` done, fewer if the run was interrupted.

    The weights are those of `best_epoch`, counted from 1: the best by `validation_accuracy`, a fraction from 0 to 1, or
    the last if that is None. `started_from` is empty for random weights. `warm_up` is a share of the run; `ema_decay`
    is 0 if weights were not averaged.
    """

    epochs: int
    epochs_done: int
    best_epoch: int
    validation_accuracy: float | None
    precision: str
    optimizer: str
    learning_rate: float
    batch_size: int
    schedule: str
    warm_up: float
    weight_decay: float
    label_smoothing: float
    class_weights: str
    ema_decay: float
    started_from: str
    is_frozen: bool


# How good a network is at its task, from 0 to 1. F1 counts a box as right if its IoU with an object is at least 0.5.
MEASURES: Mapping[Task, str] = {
    "classify": "accuracy",
    "multilabel": "accuracy",
    "detect": "F1 at an IoU of 0.5",
    "segment": "mean IoU",
    "none": "accuracy",
}


@dataclass(frozen=True, slots=True)
class CheckpointHeader:
    """A checkpoint's header. Files of older versions have no `training`.

    `test_accuracy` is a fraction from 0 to 1, on the test part: what `measure` names. `activation` turns the network's
    outputs into scores; None means that the graph tells. `detection` says how a detector's outputs are read.
    """

    architecture: str
    labels: tuple[str, ...]
    image: ImageSpec
    dataset: str
    split: dict[str, PartRecord]
    convoy_version: str
    seed: int
    test_accuracy: float
    training: TrainingRecord | None = None
    task: Task = "classify"
    activation: Activation | None = None
    detection: DetectionOutputs | None = None

    @property
    def measure(self) -> str:
        """What `test_accuracy` is, for people."""
        return MEASURES[self.task]


def convoy_version() -> str:
    """The installed version, or "unknown" in a bare checkout."""
    return installed_versions("convoy-serve").get("convoy-serve", "unknown")


def installed_versions(*distributions: str) -> dict[str, str]:
    """The installed versions, by name, in this order."""
    found = {}
    for name in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def write_checkpoint(path: Path, weights: Mapping[str, npt.NDArray[np.generic]], header: CheckpointHeader) -> None:
    """Write the file completely or not at all. Raises JobError if the disk refuses it."""
    text = json.dumps({"schema": _SCHEMA_VERSION, **dataclasses.asdict(header)})
    content = save({name: np.asarray(array, order="C") for name, array in weights.items()}, {_KEY: text})
    write_whole(path, content)


def refuse_unwritable(path: Path) -> None:
    """Raise JobError if a file cannot be written at `path`, before the work and not after it."""
    if path.parent.exists() and not path.parent.is_dir():
        raise JobError(f"{path.parent} is a file, but must be a folder for {path.name}; choose another path")
    if not path.parent.is_dir():
        raise JobError(f"there is no folder {path.parent} for {path.name}; create it first")
    if path.is_dir():
        raise JobError(f"{path} is a folder; pass a file")
    if not os.access(path.parent, os.W_OK):
        raise JobError(f"the folder {path.parent} is not writable; choose another path for {path.name}")


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step: written aside, fsynced, renamed. Nothing remains after a failure.

    Raises JobError if the disk is full or the folder is not writable.
    """
    try:
        replace_file(path, content, prefix=f".{path.name}.", mode=0o666 & ~_umask())
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror}; free space there or choose another place") from error


def read_checkpoint_header(path: Path) -> CheckpointHeader | None:
    """The header that `convoy train` wrote, or None for other safetensors files.

    Reads only the header, not the weights. Raises JobError if the file is missing, unreadable, not a safetensors file,
    or has a header of ours that is broken or newer than this version.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            found: dict[str, str] = file.metadata() or {}
    except FileNotFoundError as error:
        raise JobError(f"there is no checkpoint at {path}; check the path, or run `convoy train`") from error
    except (OSError, SafetensorError) as error:
        raise JobError(f"cannot read {path} as safetensors ({_brief(error)}); check the file") from error
    if _KEY not in found:
        return None
    try:
        return _parse(json.loads(found[_KEY]))
    except (ValueError, TypeError, KeyError, AttributeError, BundleError) as error:
        raise JobError(f"the header of {path} is broken ({_brief(error)}); train again") from error


def _parse(fields: dict[str, Any]) -> CheckpointHeader:
    schema = fields.pop("schema")
    if schema != _SCHEMA_VERSION:
        raise ValueError(f"schema {schema}, this version reads {_SCHEMA_VERSION}")
    return from_jsonable(CheckpointHeader, fields, "it")


def _umask() -> int:
    """The umask, read without changing it, which other threads could notice; 0o077 if the system hides it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o077


def _brief(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
