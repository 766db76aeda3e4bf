"""The networks that everybody serves, each as one ONNX file and as a store for Convoy.

Tensors go to the classic CIFAR CNN, trained on digits, as a bare model. Pictures go to bundles whose graphs take
bytes: that very CNN, and a network that computes next to nothing of 224x224 pixels, so that the servers show.

Knows Convoy's own commands and runs them as a user would. What they make is kept beside the peers' environments.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from convoy.loadtest.peers.forms import MODEL

from convoy.loadtest.peers.results import BodyKind, write_text
from convoy.models.errors import JobError

NetworkName = Literal["cnn", "digits", "thumbs"]
# The shorter side that pictures are resized to, and the square in the centre that is kept.
_SIDES_PX: dict[NetworkName, tuple[int, int]] = {"cnn": (0, 0), "digits": (32, 32), "thumbs": (256, 224)}
_THUMBS = """import torch


def network():
    torch.manual_seed(0)
    last = torch.nn.Linear(8 * 14 * 14, 10)
    # Answers that are all alike would tell nothing of who got whose.
    torch.nn.init.normal_(last.weight, std=0.2)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 16, stride=16), torch.nn.ReLU(), torch.nn.Flatten(), last)
"""


@dataclass(frozen=True, slots=True)
class ServedNetwork:
    """`file` is for the peers; `store` has it and nothing else, for Convoy.

    A picture's shorter side becomes `resize_px`, and of that the `crop_px` in the centre count; 0 and 0 where it is
    asked with tensors alone.
    """

    name: NetworkName
    file: Path
    store: Path
    resize_px: int
    crop_px: int

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.file.read_bytes()).hexdigest()


def network_of(body: BodyKind) -> NetworkName:
    """Which network is asked with such bodies."""
    if body == "png":
        return "digits"
    return "thumbs" if body in ("ids150k", "jpeg340", "jpeg500") else "cnn"


def ensure_networks(
    bodies: set[BodyKind], home: Path, model: Path | None, folder: Path
) -> dict[BodyKind, ServedNetwork]:
    """For each kind of body its network, made now if it is not in `home`. `model` stands in for the CNN.

    What is made anew each time goes to `folder`. Raises JobError where a command fails.
    """
    home.mkdir(parents=True, exist_ok=True)
    made: dict[NetworkName, ServedNetwork] = {}
    for name in sorted({network_of(body) for body in bodies}):
        if name == "cnn":
            file = model or _ensure_cnn(home)
            store = _bare_store(folder, file)
        else:
            store = home / "stores" / name
            file = store / name / "1" / "fp32.onnx"
            if not file.is_file():
                _export(name, home, store)
        made[name] = ServedNetwork(name, file.absolute(), store.absolute(), *_SIDES_PX[name])
    return {body: made[network_of(body)] for body in bodies}


def _ensure_cnn(home: Path) -> Path:
    kept = home / "cnn.onnx"
    if not kept.is_file():
        with tempfile.TemporaryDirectory(prefix="convoy-peers-") as temporary:
            store = Path(temporary, "store")
            plain = ("--front", "none", "--precisions", "fp32", "--store", store)
            convoy("export", "zoo:simple_cnn", "--name", MODEL, "--weights", _ensure_weights(home), *plain)
            shutil.copy(store / MODEL / "1" / "fp32.onnx", kept)
    return kept


def _ensure_weights(home: Path) -> Path:
    weights = home / "cnn.safetensors"
    if not weights.is_file():
        convoy("train", "digits", "--arch", "simple_cnn", "--epochs", "5", "--out", weights)
    return weights


def _export(name: Literal["digits", "thumbs"], home: Path, store: Path) -> None:
    plain = ("--name", name, "--precisions", "fp32", "--store", store)
    if name == "digits":
        convoy("export", "zoo:simple_cnn", "--weights", _ensure_weights(home), *plain)
        return
    factory = home / "thumbs.py"
    write_text(factory, _THUMBS)
    # What it answers means nothing, as long as every server gives the same.
    shape = ("--input", "3x224x224", "--preprocess", "imagenet")
    convoy("export", f"{factory}:network", *shape, "--random-weights", *plain)


def _bare_store(folder: Path, file: Path) -> Path:
    """A store with that very file as a bare model."""
    version = folder / "store" / MODEL / "1"
    version.mkdir(parents=True)
    shutil.copy(file, version / "model.onnx")
    return folder / "store"


def convoy(*words: object) -> None:
    """Runs one command. Raises JobError with its last words where it fails."""
    command = [sys.executable, "-m", "convoy", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise JobError(f"`convoy {words[0]}` failed: {' '.join(done.stderr.split())[-300:]}")
