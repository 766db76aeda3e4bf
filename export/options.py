"""What the user asked for, as typed on the command line and before anything of it was checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from convoy.models.datasets import DEFAULT_DATA_ROOT
from convoy.models.spec import Priorities


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """One field per option of `convoy export`; `convoy.export.plan` gives them their meaning.

    `weights` "default" means the published ones; `trust` allows a source that carries pickle. `precisions` None
    means all that can be made with what was given. `accuracy_budget_points` is in percentage points of top-1;
    `strict_gate` wants it proved, not only estimated. `data_root` is where downloaded data sets lie. The accuracies
    that are expected, or are the least, are in percent of top-1. `plan_cache` None is the server's own.
    """

    source: str
    name: str
    store: Path
    weights: Path | None = None
    input: str | None = None
    labels: Path | None = None
    preprocess: str | None = None
    front: str = "uint8"
    calibrate: str | None = None
    evaluate: str | None = None
    precisions: str | None = None
    accuracy_budget_points: float = 1.0
    strict_gate: bool = False
    calibration_method: str = "auto"
    allow_random_calibration: bool = False
    max_batch: int = 64
    priority_levels: int = Priorities().levels
    default_priority_level: int = Priorities().default
    trust: bool = False
    activation: str = "auto"
    expect_accuracy_percent: float | None = None
    min_accuracy_percent: float | None = None
    weights_key: str | None = None
    random_weights: bool = False
    force: bool = False
    data_root: Path = DEFAULT_DATA_ROOT
    plan_cache: Path | None = None
