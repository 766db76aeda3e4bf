"""What has to hold, as pure functions over what was seen; each gives one line for every breach.

Knows nothing of how anything was seen. KNOWN_DISAGREEMENTS are cells of the books that are not compared, each with
its reason; they stand on the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.campaign.endings import BOUND_S, COUNTED, PARTLY, Ending
from tests.campaign.field import READERS, Calls, ProcessState, Readers
from tests.campaign.plan import Period

MIB = 1 << 20
# Beyond what it was after the warm-up. Threads and memory of pools come as they are first needed.
MORE_DESCRIPTORS, MORE_THREADS = 4, 8
MORE_OWN_BYTES = 128 * MIB
_ADMISSIONS = ("Traceback", "this is a bug", "never retrieved", "Fatal Python error", "SIGSEGV")
_NEVER = {"wrong", "hung", "undocumented"}


@dataclass(frozen=True, slots=True)
class Known:
    """Where the books are not compared, and why. The cells of `outcome`, in periods of these kinds; else no cell."""

    what: str
    reason: str
    outcome: str = ""
    kinds: frozenset[str] = frozenset()


# By their nature: nobody could compare these.
NOT_COMPARED = (
    Known("periods in which a process is killed or replaced", "its counters go with it, and calls lose their answers"),
    Known("models that come and go, while they do", "the series of a version end when it has left"),
    Known("requests that are almost right", "what is no request to the server is counted by nobody"),
    Known(
        "calls whose client left",
        "it cannot know how the call ended: each may be any one of the server's, or none, and no more than these",
    ),
)
# What should agree and does not yet.
KNOWN_DISAGREEMENTS: tuple[Known, ...] = (
    Known(
        "503 under too few descriptors, with edges",
        "an edge that cannot hand a request on to the core says so itself, and counts that under no model's name",
        "failed",
        frozenset({"descriptors"}),
    ),
    Known(
        "what ends before a request is read: too many connections (503), headers too late (408) or too large (431)",
        "no counter of calls has it, so no client of the campaign that is compared provokes it",
    ),
    Known(
        "/v2/models/.../stats and nv_inference_*",
        "they count requests that came to a decoder or an engine's queue; what was refused before is in none of them",
    ),
)


@dataclass(frozen=True, slots=True)
class Readiness:
    """One look at readiness, and where it said yes the outcome of a real call that followed at once."""

    began_s: float
    ended_s: float
    ready: bool | None  # None: no answer
    outcome: str | None = None
    words: str = ""


@dataclass(frozen=True, slots=True)
class Window:
    """When a fault was on, until the server was well again and had worked off what had piled up.

    From `over_s` on nothing is done to it any more: with a kill at once, with a pause when it goes on.
    """

    kind: str
    from_s: float
    to_s: float
    what: str
    excuses: bool  # whether calls and readiness may suffer meanwhile
    over_s: float = 0.0


def check_endings(period: Period, endings: Iterable[Ending], windows: Sequence[Window]) -> list[str]:
    """Answers are right, calls end in time, and nobody is turned away without a cause; one line for each kind."""
    excuses = [one for one in windows if one.excuses]
    broken: dict[str, list[Ending]] = {}
    for one in endings:
        if what := _breach(period, one, excuses):
            broken.setdefault(what, []).append(one)
    return [_say(what, calls) for what, calls in broken.items()]


def _breach(period: Period, one: Ending, excuses: Sequence[Window]) -> str:
    """What is not right about how a call ended; empty where it is."""
    scene = period.scene
    if one.outcome in _NEVER:
        return f"ended as {one.outcome}"
    if one.ended_s - one.sent_s > BOUND_S + 5.0:
        return f"took more than {BOUND_S + 5.0:g} s"
    if one.outcome == "invalid" and not one.asked_wrong:
        may_be_called_wrong = one.model in scene.away or "invalid" in scene.may
        # A new server does not know the regions that the last one knew.
        has_lost_its_region = scene.loses_calls and one.client == "shared"
        return "" if may_be_called_wrong or has_lost_its_region else "was right and was called wrong"
    is_excused = not excuses or any(_overlap(one, window) for window in excuses)
    if one.words.startswith(PARTLY):
        may_be = {"rejected", "deadline_exceeded", "failed"} & scene.may
        return "" if may_be and is_excused else "was answered in part without a cause"
    if one.outcome in ("rejected", "deadline_exceeded", "failed", "broken"):
        if one.outcome == "failed" and one.model in scene.away:
            return ""
        return "" if one.outcome in scene.may and is_excused else f"ended as {one.outcome} without a cause"
    return ""


def _overlap(one: Ending, window: Window) -> bool:
    return one.sent_s <= window.to_s and one.ended_s >= window.from_s


def _say(what: str, calls: Sequence[Ending]) -> str:
    first = calls[0]
    many = "a call" if len(calls) == 1 else f"{len(calls)} calls, first that"
    where = f"of {first.client} to {first.model} at {first.sent_s:.2f} s (number {first.number})"
    return f"{many} {where}, {what}: {first.words[:400]}"


def count(endings: Iterable[Ending]) -> Calls:
    """The clients' books."""
    return Counter((one.protocol, one.model, one.outcome) for one in endings)


def check_books(period: Period, seen: Calls, counted: Calls) -> list[str]:
    """Whether the server counted what its clients saw.

    Who left, or lost its connection, cannot know how the call ended: each such call may be any one of the server's, or
    none. Models that come and go take their series with them.
    """
    if period.scene.loses_calls or period.kind == "spoiled":
        return []
    known = {one.outcome for one in KNOWN_DISAGREEMENTS if period.edges and period.kind in one.kinds}
    breaches = []
    # Who asks for a model while it is away is counted under no name.
    changing = {*period.scene.changing, ""} if period.scene.changing else set()
    models = {(protocol, model) for protocol, model, _ in (*seen, *counted) if model not in changing}
    for protocol, model in sorted(models):
        # Over gRPC the model is in the message, which nobody may have read when its client leaves.
        theirs = {name for wire, name in models if wire == protocol} if (protocol, model) == ("grpc", "") else {model}
        unsure = sum(seen[protocol, name, how] for name in theirs for how in ("left", "broken"))
        surplus = 0
        for outcome in COUNTED:
            if outcome in known:
                continue
            more = counted[protocol, model, outcome] - seen[protocol, model, outcome]
            surplus += max(0, more)
            if more < 0:
                breaches.append(
                    f"{protocol} {model}: clients saw {seen[protocol, model, outcome]} {outcome}, "
                    f"the server counted {counted[protocol, model, outcome]}"
                )
        if surplus > unsure:
            more_than = {
                outcome: (counted[protocol, model, outcome], seen[protocol, model, outcome])
                for outcome in COUNTED
                if counted[protocol, model, outcome] > seen[protocol, model, outcome]
            }
            breaches.append(
                f"{protocol} {model}: the server counted more than the {unsure} that left could be: "
                + ", ".join(f"{mine} {outcome}, seen {theirs}" for outcome, (mine, theirs) in more_than.items())
            )
    return breaches


def check_readers(period: Period, told: Readers) -> list[str]:
    """Whether all that is read of one ledger says the same of answered requests.

    To Triton's counters each file of a form is a request, and so they are not compared where images go. An answer that
    its client did not wait for is no answered call, though its model has computed it; some that are almost right do not
    wait either.
    """
    if period.scene.loses_calls or period.kind in ("leavers", "spoiled"):
        return []
    models = {model for _, model in told} - period.scene.changing - {"", "digits"}
    breaches = [f"{one} says nothing at all" for one in READERS if one not in {reader for reader, _ in told}]
    for model in sorted(models):
        counts = {reader: told[reader, model] for reader in READERS}
        if len(set(counts.values())) > 1:
            said = ", ".join(f"{count} {reader}" for reader, count in counts.items())
            breaches.append(f"{model}: readers of one ledger disagree about answered requests: {said}")
    return breaches


def check_alive(before: Sequence[ProcessState], now: Sequence[ProcessState]) -> list[str]:
    """That the processes are those that they were: nobody has died of what its clients did."""
    gone = [one for one in before if one.pid not in {two.pid for two in now}]
    return [f"a process died that nobody had killed: {one.role} {one.pid}" for one in gone]


def check_rest(
    held: tuple[int, int, int] | None,
    baseline: Sequence[ProcessState],
    now: Sequence[ProcessState],
    left: Sequence[int],
) -> list[str]:
    """Nothing in flight, and no descriptor, thread or process more than there was."""
    breaches = []
    if held is None:
        breaches.append("/stats is not answered after the period")
    elif any(held):
        breaches.append(f"still held: {held[0]} samples wait, {held[1]} requests unfinished, {held[2]} bytes")
    if sorted(one.role for one in now) != sorted(one.role for one in baseline):
        breaches.append(f"processes: {_roles(now)}, and were {_roles(baseline)}")
    if left:
        breaches.append(f"processes {', '.join(map(str, left))} outlived their server")
    for role in sorted({one.role for one in baseline}):
        for name, more in (("descriptors", MORE_DESCRIPTORS), ("threads", MORE_THREADS)):
            before = max(getattr(one, name) for one in baseline if one.role == role)
            after = max((getattr(one, name) for one in now if one.role == role), default=0)
            if after > before + more:
                breaches.append(f"a process ({role}) has {after} {name}, and had {before}")
    return breaches


def _roles(processes: Sequence[ProcessState]) -> str:
    return ", ".join(f"{many} {role}" for role, many in sorted(Counter(one.role for one in processes).items()))


def check_memory(baseline: Sequence[ProcessState], now: Sequence[ProcessState]) -> list[str]:
    """What all processes hold for themselves, against what they held after the warm-up."""
    before, after = (sum(one.own_bytes for one in states) for states in (baseline, now))
    if after - before <= MORE_OWN_BYTES:
        return []
    return [f"memory grew from {before / MIB:.0f} to {after / MIB:.0f} MiB, by more than {MORE_OWN_BYTES / MIB:.0f}"]


def check_ready(looks: Iterable[Readiness], windows: Sequence[Window], *, may: frozenset[str]) -> list[str]:
    """Ready means that requests are answered; and it is ready whenever nothing is done to it."""
    excuses = [window for window in windows if window.excuses]
    breaches = []
    for one in looks:
        if any(one.began_s <= window.to_s and one.ended_s >= window.from_s for window in excuses):
            continue
        if one.ready is not True:
            said = "gave no answer" if one.ready is None else f"said no: {one.words}"
            breaches.append(f"at {one.began_s:.2f} s readiness {said}, and nothing was done to the server")
        elif one.outcome != "success" and one.outcome not in may:
            breaches.append(
                f"at {one.began_s:.2f} s it was ready, and a real request ended as {one.outcome}: {one.words}"
            )
    return breaches


def recovery_s(window: Window, looks: Sequence[Readiness]) -> float | None:
    """How long after the trouble a real request was answered again, and they all were; to within a look.

    None: it is not known, since none was before the looks ended.
    """
    suffered = [one for one in looks if window.over_s <= one.began_s <= window.to_s and one.outcome != "success"]
    if not suffered:
        return 0.0
    after = (one for one in looks if one.began_s >= suffered[-1].ended_s and one.outcome == "success")
    answered = next(after, None)
    return None if answered is None else answered.ended_s - window.over_s


def check_log(log: str) -> list[str]:
    """Nothing that admits a bug; the first of them, with what stands around it."""
    found = [at for word in _ADMISSIONS if (at := log.find(word)) >= 0]
    if not found:
        return []
    first = min(found)
    return [f"in the log: {' / '.join(log[max(0, first - 200) : first + 1200].splitlines())}"]
