"""The objective and its burn rate: the expressions that rules and dashboards share."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.app.telemetry.metrics import LATENCY_BUCKETS_S

# Client errors and cancelled calls do not count.
DUE, NOT_DONE = "answered|failed|refused|late", "failed|refused|late"
WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
# How much faster than allowed an objective may be spent: over a long window, and still so over a short one. Chapter 5
# of Google's Site Reliability Workbook: 2 % of a month's budget in an hour, 5 % in six, 10 % in a day and in three.
FAST, SLOW = ((14.4, "1h", "5m"), (6.0, "6h", "30m")), ((3.0, "1d", "2h"), (1.0, "3d", "6h"))


@dataclass(frozen=True, slots=True)
class Objective:
    """What is promised of calls, in shares of 1 and seconds."""

    availability: float = 0.999
    latency_s: float = 0.25
    latency_share: float = 0.99

    def __post_init__(self) -> None:
        if self.latency_s not in LATENCY_BUCKETS_S:
            raise SystemExit(f"--latency-s must be one of the buckets: {', '.join(map(str, LATENCY_BUCKETS_S))}")
        if not (0 < self.availability < 1 and 0 < self.latency_share < 1):
            raise SystemExit("shares are above 0 and below 1")


def bad(window: str) -> str:
    calls = "convoy_call_duration_seconds_count"
    due = f'sum by (job) (rate({calls}{{outcome=~"{DUE}"}}[{window}]))'
    # A rate of none is no series: then none of those that were due was bad.
    return f'(sum by (job) (rate({calls}{{outcome=~"{NOT_DONE}"}}[{window}])) or 0 * {due}) / {due}'


def slow(window: str, objective: Objective) -> str:
    answered = 'outcome="answered"'
    soon = f'convoy_call_duration_seconds_bucket{{{answered}, le="{objective.latency_s!r}"}}'
    every = f"convoy_call_duration_seconds_count{{{answered}}}"
    return f"1 - sum by (job) (rate({soon}[{window}])) / sum by (job) (rate({every}[{window}]))"


def ratio(of: str, window: str) -> str:
    """The name of a recorded share."""
    return f"job:convoy_{of}_calls:ratio_rate{window}"


def burns(of: str, allowed: float, pairs: tuple[tuple[float, str, str], ...]) -> str:
    return " or ".join(
        f"({ratio(of, long)} > {rate:g} * {allowed:g} and {ratio(of, short)} > {rate:g} * {allowed:g})"
        for rate, long, short in pairs
    )


def left(share: float) -> float:
    """What an objective allows to go wrong, without the dust of floats."""
    return round(1 - share, 9)
