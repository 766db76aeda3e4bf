"""The sentences that console, report and JSON share, and the verdict on the whole run.

Pure, without markup.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from convoy.loadtest.capacity import MOST_VOID, NARROW, SHARE, CapacityProbe, void_in_a_row
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.results import LoadTestOutcome, Result
from convoy.loadtest.server_side import ServerUse
from convoy.loadtest.statistics import ConfidenceInterval, Percentile


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """Whether a run is valid, and why, in sentences."""

    word: Literal["valid", "valid, but not stable", "valid, but requests failed", "not valid"]
    why: str

    @property
    def level(self) -> Literal["good", "warn", "bad"]:
        return "good" if self.word == "valid" else "bad" if self.word == "not valid" else "warn"


def verdict(outcome: LoadTestOutcome) -> RunVerdict:
    """The verdict that the console, the report, the JSON file and the exit code share."""
    if outcome.capacity is not None:
        return RunVerdict("valid" if outcome.capacity.ending == "bracketed" else "not valid", capacity(outcome))
    stopped = "The run was stopped early; the results cover the time until then." if outcome.interrupted else None
    against = [why for why in (stopped, _of_rows(outcome, lambda row: row.verdict.void)) if why is not None]
    if against:
        return RunVerdict("not valid", " ".join(against))
    offered, failed = (sum(getattr(row.summary, name) for row in outcome.rows) for name in ("offered", "failed"))
    if not any(row.summary.good for row in outcome.rows):
        return RunVerdict("not valid", f"None of the {offered:,} requests succeeded.")
    unstable = _of_rows(outcome, lambda row: row.stability.why_not)
    if failed:
        told = f"{failed:,} of {offered:,} requests failed."
        return RunVerdict("valid, but requests failed", told if unstable is None else f"{told} Not stable: {unstable}")
    if unstable is not None:
        return RunVerdict("valid, but not stable", unstable)
    on_time = "" if outcome.shown.rate is None else ", and the load generator kept its schedule"
    return RunVerdict("valid", f"All requests succeeded{on_time}.")


def _of_rows(outcome: LoadTestOutcome, reason: Callable[[Result], str | None]) -> str | None:
    """As a sentence; of several rows, how many have a reason, and the first one. None if no row has one."""
    found = [(row.name, why) for row in outcome.rows if (why := reason(row)) is not None]
    if not found:
        return None
    name, why = found[0]
    told = why if len(outcome.rows) == 1 else f"{len(found)} of {len(outcome.rows)} steps; {name}: {why}"
    return f"{told[0].upper()}{told[1:]}."


def load(options: LoadTestOptions) -> str:
    """What is sent, in a few words."""
    if options.find_capacity:
        return f"search for the highest rate with {100 * SHARE:.0f} % of responses within {options.slo_ms:g} ms"
    arrivals: str = options.arrivals
    if arrivals == "bursts":
        arrivals = f"bursts of {options.burst_on_s:g} s and pauses of {options.burst_off_s:g} s, on average"
    if options.steps:
        rates = ", ".join(f"{rate:g}" for rate in options.steps)
        return f"{arrivals}, steps of {rates} requests/s"
    if options.rate is not None:
        return f"{arrivals} {options.rate:g} requests/s"
    return f"{options.clients} clients"


def title(outcome: LoadTestOutcome) -> str:
    """What was tested, and how."""
    target = outcome.target
    return f"{target.model} at {target.endpoint.url}, {target.body} bodies, {load(outcome.options)}"


def probe(one: CapacityProbe) -> str:
    """The result of one probe, in one line."""
    if one.void:
        return f"{one.rate:,.1f} requests/s: not valid, the load generator was late or failed"
    result = "sustained" if one.sustained else "not sustained"
    return f"{one.rate:,.1f} requests/s: {share(one.goodput)} in time, {result}"


def standing_title(outcome: LoadTestOutcome) -> str:
    """The heading above `standing`."""
    return "" if outcome.capacity is None else "sustained"


def standing(outcome: LoadTestOutcome, row: Result) -> str:
    """The last column of the table of steps or probes."""
    if row.verdict.void is not None:
        return "not valid"
    if outcome.capacity is None:
        return "" if row.stability.why_not is None else "not stable"
    goodput = row.summary.goodput
    return "yes" if goodput is not None and goodput >= SHARE else "no"


def capacity(outcome: LoadTestOutcome) -> str:
    """The result of the search."""
    found, slo_ms = outcome.capacity, outcome.options.slo_ms
    assert found is not None
    low, high = found.sustained, found.failed
    goal = f"{100 * SHARE:.0f} % of responses within {slo_ms:g} ms"
    if low is not None and high is not None and found.width is not None and found.ending == "bracketed":
        return (
            f"Capacity: {low:,.1f} requests/s with {goal}. The next rate, {high:,.1f} requests/s "
            f"({100 * found.width / low:.1f} % higher), was not sustained."
        )
    if outcome.interrupted:
        least = "no rate was sustained" if low is None else f"{low:,.1f} requests/s were sustained"
        return f"No capacity found: the search was stopped after {len(found.probes)} probes; so far {least}."
    last = found.probes[-1]
    if found.ending == "dead":
        why = "" if last.reason is None else f" ({last.reason})"
        return f"No capacity found: at {last.rate:,.1f} requests/s no request succeeded{why}."
    if found.ending == "generator":
        least = "the server was not measured" if low is None else f"the server sustains at least {low:,.1f} requests/s"
        voids = void_in_a_row(found.probes)
        if voids >= MOST_VOID:
            return f"No capacity found: {voids} probes in a row were not valid; {least}. Last reason: {last.reason}."
        return f"No capacity found: the load generator could not send {high:,.1f} requests/s; {least}."
    if found.ending == "not reached":
        return f"No capacity found: all rates were sustained, up to {low:,.1f} requests/s."
    if found.ending == "too slow":
        return f"No capacity found: even {high:,.1f} requests/s were not sustained with {goal}."
    return (
        f"No capacity found: it lies between {low:,.1f} and {high:,.1f} requests/s, which is wider than "
        f"{100 * NARROW:.0f} %."
    )


def server_use(use: ServerUse) -> list[tuple[str, str]]:
    """The server's CPU and memory, as pairs of label and value."""
    rows = [("CPU, cores", f"{use.cores:.2f}{interval(use.cores_interval, 2)}")]
    if use.cpu_ms_per_answer is not None:
        figure = f"{use.cpu_ms_per_answer:.3f} ms{interval(use.cpu_ms_per_answer_interval, 3)}"
        rows.append(("CPU per successful request", figure))
    rows.append(("peak memory", f"{use.peak_mib:,.0f} MiB"))
    return rows


def notes(outcome: LoadTestOutcome) -> list[str]:
    """Remarks on the figures, each with the name of its row if there are several."""
    return [f"{row.name}: {note}" if row.name else note for row in outcome.rows for note in row.verdict.notes]


def share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def percentile(one: Percentile, good: int) -> str:
    """The latency with its interval, or why there is none."""
    if one.latency_ms is None:
        return f"needs {one.needs:,} responses, has {good:,}"
    return f"{one.latency_ms:.2f} ms{interval(one.interval_ms, 2)}"


def interval(one: ConfidenceInterval | None, digits: int) -> str:
    return "" if one is None else f" ({one.low:,.{digits}f} to {one.high:,.{digits}f})"
