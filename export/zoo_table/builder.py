"""What TensorRT for RTX makes of one ONNX file, without a GPU, as a cell of the table.

Knows the cell. `convoy.export.ahead` builds, in a child process, which may crash.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from convoy.app.engines.tensorrt_library import RTX
from convoy.export.ahead import AheadJob, build_ahead, installed_version
from convoy.export.sources.torch_job import one_line
from convoy.export.zoo_table.rows import BuilderCell
from convoy.models.bundle import Precision

_MOST_SAMPLES = 8
_WHY_CHARACTERS = 600


def library() -> str:
    """The builder's name and version; empty where it is not installed."""
    version = installed_version(RTX)
    return f"{RTX.title} {version}" if version else ""


def build(onnx: Path, precision: Precision) -> BuilderCell:
    """Have `onnx` built for batches of 1 to 8; never raises for what becomes of it, and keeps no plan."""
    with TemporaryDirectory(prefix="convoy-zoo-plan-") as cache:
        verdict = build_ahead(AheadJob(Path(cache), RTX, (), _MOST_SAMPLES), onnx, precision)
    return BuilderCell(
        precision,
        accepted=verdict.accepted,
        megabytes=round(verdict.plan_bytes / 1e6, 1) if verdict.accepted else None,
        seconds=round(verdict.build_s, 2),
        warnings=verdict.warnings,
        why=one_line(verdict.reason, _WHY_CHARACTERS),
    )
