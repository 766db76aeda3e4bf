"""Compiles the hot path to C with mypyc, if CONVOY_USE_MYPYC=1; what the project is stands in pyproject.toml.

The modules are the same files that Python runs as they are. They are what every request passes: the scheduler, the
short way at the edge, the engine's hand-over.
"""

import os
import sys

from setuptools import setup

COMPILED = (
    "app/edge/entry.py",
    "app/edge/http/express.py",
    "app/edge/timing.py",
    "app/engines/delivery.py",
    "app/lifecycle/lane_runner.py",
    "app/scheduling/extents.py",
    "app/scheduling/forecast.py",
    "app/scheduling/latency.py",
    "app/scheduling/placement.py",
    "app/scheduling/policy.py",
    "app/scheduling/queues.py",
    "app/scheduling/request.py",
    "app/scheduling/sacrifice.py",
    "app/scheduling/scheduler.py",
    "app/scheduling/slab.py",
    "app/scheduling/staging.py",
    "app/scheduling/timeline.py",
    "app/telemetry/tally.py",
)

if os.environ.get("CONVOY_USE_MYPYC") == "1":
    if "editable_wheel" in sys.argv:
        sys.exit("what is installed as editable is interpreted, so that a change is what runs; unset CONVOY_USE_MYPYC")
    from mypyc.build import mypycify

    # Libraries are not looked at, whether they are here or not, so that every build is the same; `make check` has
    # checked the types with them.
    options = ["--no-site-packages", "--ignore-missing-imports", "--follow-imports=silent", *COMPILED]
    setup(ext_modules=mypycify(options, opt_level="3", debug_level="0", group_name="convoy"))
else:
    setup()
