"""The sentences that the terminal and the page have in common.

Pure; knows what a reader must be told, and no markup.
"""

from __future__ import annotations

from convoy.loadtest.capacity import MOST_VOID, NARROW, SHARE, CapacityProbe, void_in_a_row
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.results import LoadTestOutcome, Result
from convoy.loadtest.server_side import ServerUse
from convoy.loadtest.statistics import ConfidenceInterval, Percentile


def load(options: LoadTestOptions) -> str:
    """What is sent, in a few words."""
    if options.find_capacity:
        return f"search for the highest rate with {100 * SHARE:.0f} % good within {options.slo_ms:g} ms"
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
    """A rate that was tried, in one line."""
    if one.void:
        return f"{one.rate:,.1f} requests/s: void, the load generator was late or broke"
    verdict = "sustained" if one.sustained else "not sustained"
    return f"{one.rate:,.1f} requests/s: {share(one.goodput)} good, {verdict}"


def standing_title(outcome: LoadTestOutcome) -> str:
    """The heading above `standing`."""
    return "" if outcome.capacity is None else "sustained"


def standing(outcome: LoadTestOutcome, row: Result) -> str:
    """What to think of one row of the table."""
    if row.verdict.void is not None:
        return "VOID"
    if outcome.capacity is None:
        return "" if row.stability.why_not is None else "not stable"
    goodput = row.summary.goodput
    return "yes" if goodput is not None and goodput >= SHARE else "no"


def capacity(outcome: LoadTestOutcome) -> str:
    """What the search has found."""
    found, slo_ms = outcome.capacity, outcome.options.slo_ms
    assert found is not None
    low, high = found.sustained, found.failed
    goal = f"{100 * SHARE:.0f} % good within {slo_ms:g} ms"
    if low is not None and high is not None and found.width is not None and found.ending == "bracketed":
        return (
            f"Capacity: {low:,.1f} requests/s with {goal}. The bracket is {found.width:,.1f} requests/s "
            f"({100 * found.width / low:.1f} %) wide: {high:,.1f} was not sustained."
        )
    if outcome.interrupted:
        least = "no rate was found to be sustained" if low is None else f"{low:,.1f} requests/s were sustained"
        return f"No capacity: the search was stopped after {len(found.probes)} probes; so far {least}."
    last = found.probes[-1]
    if found.ending == "dead":
        why = "" if last.reason is None else f" ({last.reason})"
        return f"No capacity: at {last.rate:,.1f} requests/s not one request was answered well{why}."
    if found.ending == "generator":
        least = "nothing is known of the server" if low is None else f"the server sustains at least {low:,.1f}"
        voids = void_in_a_row(found.probes)
        if voids >= MOST_VOID:
            return f"No capacity: {voids} tries in a row were void; {least}. The last one: {last.reason}."
        return f"No capacity: the load generator could not offer {high:,.1f} requests/s; {least}."
    if found.ending == "not reached":
        return f"No capacity: every rate tried was sustained, up to {low:,.1f} requests/s."
    if found.ending == "too slow":
        return f"No capacity: even {high:,.1f} requests/s are not sustained with {goal}."
    return f"No capacity: the bracket {low:,.1f} to {high:,.1f} requests/s is wider than {100 * NARROW:.0f} %."


def server_use(use: ServerUse) -> list[tuple[str, str]]:
    """What is told of the server's CPU and memory, and its figure."""
    rows = [("CPU, cores", f"{use.cores:.2f}{interval(use.cores_interval, 2)}")]
    if use.cpu_ms_per_answer is not None:
        figure = f"{use.cpu_ms_per_answer:.3f} ms{interval(use.cpu_ms_per_answer_interval, 3)}"
        rows.append(("CPU for each good answer", figure))
    rows.append(("memory, most", f"{use.peak_mib:,.0f} MiB"))
    return rows


def notes(outcome: LoadTestOutcome) -> list[str]:
    """What qualifies the figures; of several rows, the row's name before it."""
    found = []
    for row in outcome.rows:
        name = f"{row.name}: " if row.name else ""
        found += [f"{name}{note}" for note in row.verdict.notes]
        if row.stability.why_not is not None and outcome.capacity is None:
            found.append(f"{name}not stable: {row.stability.why_not}")
    return found


def voids(outcome: LoadTestOutcome) -> list[str]:
    """Why figures mean nothing: the run's reason, or how many of the rows have one, and the first.

    A search that was stopped for it has said so.
    """
    if outcome.capacity is not None and void_in_a_row(outcome.capacity.probes) >= MOST_VOID:
        return []
    found = [(row.name, row.verdict.void) for row in outcome.rows if row.verdict.void is not None]
    if len(outcome.rows) == 1:
        return [void for _, void in found]
    if not found:
        return []
    name, first = found[0]
    return [f"{len(found)} of {len(outcome.rows)} rows of the table; {name}: {first}"]


def share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def percentile(one: Percentile, good: int) -> str:
    """With its interval, or why there is none."""
    if one.latency_ms is None:
        return f"needs {one.needs} answers, has {good}"
    return f"{one.latency_ms:.2f} ms{interval(one.interval_ms, 2)}"


def interval(one: ConfidenceInterval | None, digits: int) -> str:
    return "" if one is None else f" ({one.low:,.{digits}f} to {one.high:,.{digits}f})"
