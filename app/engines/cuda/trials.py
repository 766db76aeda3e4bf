"""Try several ways to open a model on a GPU, in turns on the device itself, and remember the result in a file.

Each is tried with the smallest and the largest batch in turns, as in a server, so the cost of changing sizes is
included. The remembered result is a hint and not code: a wrong one only makes an engine slow.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import TypeVar

from convoy.app.engines.batch import EngineFailure
from convoy.app.engines.cuda.engine import CudaEngine
from convoy.app.engines.measure import make_probe
from convoy.models.errors import BundleError, ConvoyError
from convoy.models.records import from_jsonable, to_jsonable

_log = logging.getLogger("convoy")
_ROUNDS = 7

Way = TypeVar("Way")
Record = TypeVar("Record")
# Milliseconds by batch size.
Times = dict[int, float]


def try_all(
    open_trial: Callable[[Way, tuple[int, ...]], CudaEngine], ways: Iterable[Way], sizes: tuple[int, ...]
) -> tuple[dict[Way, Times], EngineFailure | BundleError | None]:
    """The times of all that run, and the failure of the last that does not."""
    tried: dict[Way, Times] = {}
    problem: EngineFailure | BundleError | None = None
    for way in ways:
        try:
            tried[way] = _times_ms(open_trial(way, sizes), sizes)
        except (EngineFailure, BundleError) as failure:
            problem = _without_frames(failure)
    return tried, problem


def best_of(tried: dict[Way, Times]) -> Way:
    """The fastest; a tenth of the smallest batch's time counts as much as a tenth of the largest's."""
    return min(tried, key=lambda way: math.prod(tried[way].values()))


def told(tried: dict[Way, Times], name: Callable[[Way], str]) -> dict[str, dict[str, float]]:
    """The times in the form of a record."""
    return {name(way): {str(size): round(ms, 4) for size, ms in times.items()} for way, times in tried.items()}


def _times_ms(engine: CudaEngine, sizes: tuple[int, ...]) -> Times:
    try:
        engine.warm_up()
        parts = {size: make_probe(engine, size).part for size in sizes}
        # The device's own time: copies cost the same in all ways, and other models use the host too.
        rounds = [{size: engine.run([part]).times.compute_ns for size, part in parts.items()} for _ in range(_ROUNDS)]
        return {size: median(taken[size] for taken in rounds) / 1e6 for size in sizes}
    finally:
        engine.close()


def _without_frames(failure: EngineFailure | BundleError) -> EngineFailure | BundleError:
    """The failure without tracebacks, whose frames would keep a closed engine's session and memory alive."""
    failure.__cause__ = failure.__context__ = None
    return failure.with_traceback(None)


def read_memory(path: Path, kind: type[Record], schema_version: int) -> Record | None:
    """Read the remembered result; None if there is none, or from another version."""
    try:
        body = json.loads(path.read_bytes())
        if not isinstance(body, dict) or body.get("schema_version") != schema_version:
            return None
        return from_jsonable(kind, body, path.name)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ConvoyError) as error:
        _log.warning("cannot read %s (%s); measuring again", path, error)
        return None


def write_memory(path: Path, record: object) -> None:
    """Write the result; if that fails, it is measured again next time."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        aside.write_text(json.dumps(to_jsonable(record), indent=1))
        aside.replace(path)
    except OSError as error:
        _log.info("cannot save the measurements (%s)", error)
