"""A peer that answers at once and wrongly."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

os.environ["PEER_ADDS"] = "1"
runpy.run_path(str(Path(__file__).parent.parent / "echo" / "serve.py"))
