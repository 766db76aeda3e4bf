"""The network that everybody serves: the classic CIFAR CNN, trained on digits and exported, as one ONNX file.

Knows Convoy's own commands and runs them as a user would. The file is kept beside the peers' environments.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from convoy.loadtest.peers.contender import MODEL
from convoy.models.errors import JobError


def ensure_network(home: Path) -> Path:
    """The ONNX file in `home`, made now if it is not there. Raises JobError where a command fails."""
    kept = home / "cnn.onnx"
    if kept.is_file():
        return kept
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="convoy-peers-") as temporary:
        folder = Path(temporary)
        weights, store = folder / "cnn.safetensors", folder / "store"
        convoy("train", "digits", "--arch", "simple_cnn", "--epochs", "5", "--out", weights)
        plain = ("--front", "none", "--precisions", "fp32", "--store", store)
        convoy("export", "zoo:simple_cnn", "--name", MODEL, "--weights", weights, *plain)
        shutil.copy(store / MODEL / "1" / "fp32.onnx", kept)
    return kept


def make_store(folder: Path, network: Path) -> Path:
    """A store with that very file as a bare model."""
    version = folder / "store" / MODEL / "1"
    version.mkdir(parents=True)
    shutil.copy(network, version / "model.onnx")
    return folder / "store"


def sha256(network: Path) -> str:
    return hashlib.sha256(network.read_bytes()).hexdigest()


def convoy(*words: object) -> None:
    """Runs one command. Raises JobError with its last words where it fails."""
    command = [sys.executable, "-m", "convoy", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise JobError(f"`convoy {words[0]}` failed: {' '.join(done.stderr.split())[-300:]}")
