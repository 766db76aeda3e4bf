"""Stores to serve from: the demo bundle and bare models, in a folder of the test's own."""

from __future__ import annotations

import hashlib
import io
import shutil
from dataclasses import replace
from pathlib import Path

from PIL import Image

from convoy.models.bundle import MANIFEST, FileRecord, read_manifest, seal
from tests.support import onnx_models

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo" / "digits" / "1"
DATA = ROOT / "tests" / "data"
# The dtypes that numpy knows; BYTES and BF16 travel in forms of their own.
IDENTITIES = tuple(dtype for dtype in onnx_models.ONNX_TYPES if dtype not in ("BYTES", "BF16"))


class StoreFolder:
    """A store that a test fills as it likes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def add_digits(self, version: int = 1, name: str = "digits") -> Path:
        """The demo bundle; its own name stays in its manifest."""
        folder = self.root / name / str(version)
        shutil.copytree(DEMO, folder)
        return folder

    def add_add_sub(self, version: int = 1, name: str = "simple") -> Path:
        return onnx_models.add_sub(self._bare(name, version))

    def add_mean(self, name: str = "mean") -> Path:
        return onnx_models.mean(self._bare(name, 1))

    def add_nonzero(self) -> Path:
        return onnx_models.nonzero(self._bare("nonzero", 1))

    def add_shift(self, by: float, version: int = 1, name: str = "shift") -> Path:
        """Written aside and renamed, so that whoever watches sees it whole; replaces what was there."""
        whole = onnx_models.shift(self.root.parent / f"whole-{name}-{version}" / "1" / "model.onnx", by)
        target = self._bare(name, version)
        target.parent.mkdir(parents=True, exist_ok=True)
        return whole.replace(target)

    def add_identity(
        self, dtype: str = "FP32", dims: onnx_models.Dims = ("batch", "size"), *, name: str | None = None
    ) -> Path:
        return onnx_models.identity(self._bare(name or f"identity_{dtype.lower()}", 1), dtype, dims)

    def _bare(self, name: str, version: int) -> Path:
        return self.root / name / str(version) / "model.onnx"


def make_int8_right_everywhere(folder: Path) -> None:
    """Put the exact file in the place of the bundle's INT8 one.

    That one was made on a processor with 8-bit dot products; one without them adds in 16 bits, which overflow, and its
    canary refuses the file. What a test asks of the choice between files must not depend on the processor.
    """
    exact = (folder / "fp32.onnx").read_bytes()
    (folder / "int8-cpu.onnx").write_bytes(exact)
    manifest = read_manifest(folder)
    record = FileRecord(hashlib.sha256(exact).hexdigest(), len(exact))
    (folder / MANIFEST).write_bytes(seal(replace(manifest, files={**manifest.files, "int8-cpu.onnx": record})))


def picture(side: int, mode: str, form: str) -> bytes:
    """A square of one colour: few bytes for many pixels."""
    out = io.BytesIO()
    Image.new(mode, (side, side), (40, 80, 120, 200)[: len(mode)]).save(out, form)
    return out.getvalue()


def digit(word: str) -> bytes:
    """A real handwritten digit, such as `digit("seven")`, as a PNG that no model was trained on."""
    return (DATA / f"{word}.png").read_bytes()
