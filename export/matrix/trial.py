"""One case, as a user would try it: `convoy export` in a folder and a process of its own.

Knows the command, its exit codes and the bundle that it leaves. Never raises for what becomes of a case.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from convoy.export.matrix.cases import Case
from convoy.export.matrix.made.originals import TRUTH
from convoy.export.matrix.rows import MatrixRow, Verdict
from convoy.export.proof.verify import MAX_FP32_ERROR, relative_error
from convoy.export.rows import count_of, joined, picked
from convoy.export.sources.torch_job import one_line
from convoy.export.variants.precision import REFERENCE
from convoy.export.variants.variant import opened
from convoy.models.bundle import Manifest, read_manifest

# What every command has before its own words, which may say otherwise.
COMMON = ("--name", "net", "--precisions", "fp32", "--max-batch", "4")
_LIMIT_S = 7200
_SAID_CHARACTERS = 500


def try_case(case: Case) -> MatrixRow:
    """Prepare the case in a fresh folder, run its command there, and read what became of it."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="convoy-matrix-") as temporary:
        folder = Path(temporary)
        words = tuple(case.prepare(folder))
        verdict, error, said = _outcome(words, folder)
        return MatrixRow(
            case.group,
            case.what,
            shlex.join(("convoy", "export", *words)),
            verdict,
            error,
            is_known=error is not None and (folder / TRUTH).exists(),
            said=one_line(said.replace(f"{folder}/", ""), _SAID_CHARACTERS),
            seconds=round(time.monotonic() - started_s, 1),
        )


def _outcome(words: tuple[str, ...], folder: Path) -> tuple[Verdict, float | None, str]:
    command = [sys.executable, "-m", "convoy", "export", *COMMON, *words]
    # Nothing that an earlier run left is taken instead of trying.
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "NO_COLOR": "1", "COLUMNS": "200"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "broken", None, f"no end within {_LIMIT_S} s"
    if done.returncode == 0:
        return _held_against_the_truth(folder)
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    if done.returncode in (1, 2) and last.startswith("convoy: "):
        return "refused", None, last.removeprefix("convoy: ")
    return "broken", None, f"exit code {done.returncode}: {last}"


def _held_against_the_truth(folder: Path) -> tuple[Verdict, float | None, str]:
    bundle = folder / "store" / "net" / "1"
    manifest = read_manifest(bundle)
    error = manifest.variant(REFERENCE.file).max_relative_error
    if (folder / TRUTH).exists():
        error = max(error, _error_of(manifest, bundle, load_file(folder / TRUTH)))
    if error > MAX_FP32_ERROR:
        return "broken", error, f"published with a relative error of {error:.1g}"
    return "exact", error, _remarks(manifest)


def _error_of(manifest: Manifest, bundle: Path, truth: dict[str, np.ndarray]) -> float:
    spec, most = manifest.spec, manifest.spec.max_batch_size
    given = {spec.inputs[0].name: truth["images"]}
    with opened(spec, [REFERENCE], bundle) as (fp32,):
        starts = range(0, count_of(given), most)
        found = joined([fp32.answers(picked(given, slice(start, start + most))) for start in starts])
    return relative_error(found[spec.outputs[0].name], truth["answers"])


def _remarks(manifest: Manifest) -> str:
    """What export said of the network, but for how it was compared."""
    _, _, remark = manifest.variant(REFERENCE.file).reason.partition("; ")
    entry = manifest.provenance.weights_entry
    weights = f"weights: {entry}" if entry else ""
    return "; ".join(filter(None, (weights, remark, *manifest.findings)))
