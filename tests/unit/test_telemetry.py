"""Nothing that Convoy imports reports to anybody, or leaves an identity in the user's home."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("module", ["convoy.app.engines.onnxruntime", "convoy.export.profiling.roofline"])
def test_importing_onnx_runtime_leaves_no_trace_at_home(tmp_path: Path, module: str) -> None:
    code = f"import {module}, sys; assert 'onnxruntime' in sys.modules"
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=env)
    assert list(tmp_path.rglob("*onnxruntime*")) == []
