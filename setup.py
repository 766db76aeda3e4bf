"""Compiles the hot path to C with mypyc, if CONVOY_USE_MYPYC=1; what the project is stands in pyproject.toml.

The modules are the same files that Python runs as they are. They are what every request passes: the scheduler, the
calls at the edge, the engine's hand-over.
"""

import os
import sys

from setuptools import setup

COMPILED = (
    "convoy/app/edge/oip/call.py",
    "convoy/app/edge/oip/decoder.py",
    "convoy/app/edge/oip/predicting.py",
    "convoy/app/edge/entry.py",
    "convoy/app/edge/few_scores.py",
    "convoy/app/edge/http/body.py",
    "convoy/app/edge/http/gate.py",
    "convoy/app/edge/http/hot_route.py",
    "convoy/app/edge/http/infer.py",
    "convoy/app/edge/http/infer_response.py",
    "convoy/app/edge/http/predictions.py",
    "convoy/app/edge/http/replies.py",
    "convoy/app/edge/timing.py",
    "convoy/app/engines/delivery.py",
    "convoy/app/engines/parts.py",
    "convoy/app/lifecycle/catalog.py",
    "convoy/app/lifecycle/lane_runner.py",
    "convoy/app/lifecycle/reports.py",
    "convoy/app/listeners.py",
    "convoy/app/scheduling/decoding.py",
    "convoy/app/scheduling/extents.py",
    "convoy/app/scheduling/forecast.py",
    "convoy/app/scheduling/gathering.py",
    "convoy/app/scheduling/latency.py",
    "convoy/app/scheduling/patience.py",
    "convoy/app/scheduling/placement.py",
    "convoy/app/scheduling/policy.py",
    "convoy/app/scheduling/queues.py",
    "convoy/app/scheduling/request.py",
    "convoy/app/scheduling/early_drop.py",
    "convoy/app/scheduling/scheduler.py",
    "convoy/app/scheduling/slab.py",
    "convoy/app/scheduling/staging.py",
    "convoy/app/scheduling/timeline.py",
    "convoy/app/telemetry/ledger.py",
    "convoy/app/telemetry/ran_batches.py",
)

# As in constraints.txt: what another release compiles nobody has tried.
COMPILER = "mypy==2.4.1"

if os.environ.get("CONVOY_USE_MYPYC") == "1" and "egg_info" in sys.argv:
    setup(setup_requires=[COMPILER])  # an installer asks what the build needs, and gets that for the build alone
elif os.environ.get("CONVOY_USE_MYPYC") == "1":
    if "editable_wheel" in sys.argv:
        sys.exit("what is installed as editable is interpreted, so that a change is what runs; unset CONVOY_USE_MYPYC")
    from mypyc.build import mypycify

    # Libraries are not looked at, whether they are here or not, so that every build is the same; `make check` has
    # checked the types with them.
    options = ["--no-site-packages", "--ignore-missing-imports", "--follow-imports=silent", *COMPILED]
    setup(ext_modules=mypycify(options, opt_level="3", debug_level="0", group_name="convoy"))
else:
    setup()
