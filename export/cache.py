"""Results of slow steps, cached for the next run.

A key is a hash over everything that a result depends on: contents of files, options, versions of tools. So nothing
becomes stale, only unused; the least recently used results are removed when the folder gets large. The cache may be
lost, broken or unwritable at any time without harm, and its contents are checked before use. It has no pickles.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np
import onnxruntime
import safetensors.numpy

from convoy.app.engines.cpu import cpu_model
from convoy.models.checkout import IMPORT_ROOT
from convoy.models.files import replace_file
from convoy.models.plan_cache import default_plan_cache

_DIGEST_BYTES = hashlib.sha256().digest_size


def default_root() -> Path:
    """`~/.cache/convoy/export`, or below XDG_CACHE_HOME."""
    return default_plan_cache() / "export"


def step_key(step: str, *inputs: str) -> str:
    """The name of a step's result. The inputs' order counts; no two lists of inputs share a key.

    Convoy's own code and the versions of the tools that compute are always included.
    """
    joined = "".join(f"{len(part)}:{part}" for part in (step, _tools(), *inputs))
    return f"{step}-{hashlib.sha256(joined.encode()).hexdigest()[:40]}"


@cache
def _tools() -> str:
    digest = hashlib.sha256()
    for package in ("export", "models", "app/engines"):
        for path in sorted((IMPORT_ROOT / "convoy" / package).rglob("*.py")):
            digest.update(path.read_bytes())
    versions = [metadata.version(name) for name in ("numpy", "onnx", "Pillow")]
    return f"{digest.hexdigest()} {versions} onnxruntime {onnxruntime.__version__} {cpu_model()}"


@dataclass(frozen=True, slots=True)
class StepCache:
    """Results in one folder of at most `limit_bytes`; None for `root` keeps nothing."""

    root: Path | None
    limit_bytes: int = 2 << 30

    def read(self, key: str) -> bytes | None:
        """The result, or None if there is none or it was damaged."""
        if self.root is None:
            return None
        path = self.root / key
        try:
            content = path.read_bytes()
        except OSError:
            return None
        digest, result = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(result).digest() != digest:
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)
        return result

    def write(self, key: str, result: bytes) -> None:
        """Keep the result, written aside and renamed. Results that are too large or cannot be written are dropped."""
        if self.root is None or len(result) > self.limit_bytes // 2:
            return
        with suppress(OSError):
            self.root.mkdir(parents=True, exist_ok=True)
            content = hashlib.sha256(result).digest() + result
            replace_file(self.root / key, content, prefix=".writing-", mode=0o600)
            self._shrink()

    def read_arrays(self, key: str) -> dict[str, np.ndarray] | None:
        """A result that `write_arrays` kept."""
        result = self.read(key)
        return None if result is None else safetensors.numpy.load(result)

    def write_arrays(self, key: str, arrays: dict[str, np.ndarray]) -> None:
        """Keep named arrays."""
        self.write(key, safetensors.numpy.save({name: np.ascontiguousarray(a) for name, a in arrays.items()}))

    def _shrink(self) -> None:
        assert self.root is not None
        entries = sorted(
            ((stat.st_mtime, stat.st_size, path) for path in self.root.iterdir() for stat in [path.stat()]),
            key=lambda entry: entry[0],
        )
        total = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if total <= self.limit_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


NO_CACHE = StepCache(None)
