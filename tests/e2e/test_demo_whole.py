"""The demo from outside: the whole way, which ends by itself and keeps what it wrote."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from convoy.models.bundle import open_bundle
from tests.support.stores import ROOT
from tests.support.tools import found_tool


@pytest.mark.long
def test_the_whole_way_is_kept_and_pictured(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "tests.demo", "--folder", str(folder), "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    film = (folder / "demo.md").read_text()
    steps = re.findall(r"^## \d\. (\w+)$", film, re.MULTILINE)
    assert steps == ["Train", "Export", "Serve", "Predict", "Load", "Look"]
    assert {"fp32.onnx", "int8-cpu.onnx"} <= set(open_bundle(folder / "store" / "digits" / "1").manifest.files)
    assert "INFO    ready: digits/1" in film
    for file in ("digits.safetensors", "digits.training.html", "load.html", "load.json", "demo.md"):
        assert (folder / file).stat().st_size > 100
    assert str(folder / "store") in done.stdout
    pictures = re.findall(r"^!\[.*\]\((.*)\)$", film, re.MULTILINE)
    if found_tool("chromium") is None:
        assert pictures == []
        assert "No pictures" in done.stdout
    for picture in pictures:
        with Image.open(folder / picture) as image:
            assert image.width == 1200
        assert (folder / picture).stat().st_size < 150_000
