"""Under which conditions a comparison is made: the machine, the versions, the clock.

Knows how to ask the operating system. Judges nothing.
"""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from convoy.loadtest.peers.results import HostInfo


def machine() -> HostInfo:
    """As it is at this moment."""
    return HostInfo(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        kernel=platform.release(),
        python=platform.python_version(),
        load_average=os.getloadavg()[0],
    )


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="minutes")


def convoy_versions() -> dict[str, str]:
    """Of Convoy, its engine and numpy."""
    found = {"convoy-serve": "convoy", "onnxruntime": "onnxruntime", "onnxruntime-gpu": "onnxruntime", "numpy": "numpy"}
    versions = {}
    for distribution, name in found.items():
        try:
            versions[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
