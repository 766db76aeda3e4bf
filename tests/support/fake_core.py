"""The core's process over fake engines, behind edge processes; `fake_server` becomes their supervisor."""

from __future__ import annotations

from convoy.app.processes import core_process
from tests.support.fake_server import make_core

if __name__ == "__main__":
    raise SystemExit(core_process.main(make_core))
