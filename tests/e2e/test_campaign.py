"""A short campaign: a real server under the mixture of clients and the faults of one seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers import check_ended
from tests.support.stores import ROOT

SEED = "44"  # leavers, large pictures, a kill, overload and a pause


@pytest.mark.long
def test_a_short_campaign_holds(tmp_path: Path) -> None:
    """Its invariants are its own; a breach is a line here, with the command that does the same again."""
    command = [sys.executable, "-m", "tests.campaign", "--minutes", "0.7", "--seed", SEED, "--out", str(tmp_path)]
    ended = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=280, check=False
    )
    check_ended(ended, 0, "every invariant held", f"--seed {SEED}")
