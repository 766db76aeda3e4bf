"""What has to hold, as pure functions over what was seen; each gives one line for every breach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.campaign.clients import BOUND_S, PARTLY, Ending
from tests.campaign.plan import Period
from tests.campaign.server import READERS, Calls, ProcessState, Readers

MIB = 1 << 20
# Beyond what it was after the warm-up. Threads and memory of pools come as they are first needed.
MORE_DESCRIPTORS, MORE_THREADS, MORE_OWN_BYTES = 4, 8, 128 * MIB
_ADMISSIONS = ("Traceback", "this is a bug", "never retrieved", "Fatal Python error", "SIGSEGV")
_COUNTED = ("success", "invalid", "rejected", "deadline_exceeded", "failed", "cancelled")
_NEVER = {"wrong", "hung", "undocumented"}


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
    """When a fault was on, until the server should have recovered; calls and readiness may suffer if it `excuses`."""

    what: str
    from_s: float
    to_s: float
    excuses: bool

    def overlaps(self, began_s: float, ended_s: float) -> bool:
        return began_s <= self.to_s and ended_s >= self.from_s


def check_endings(period: Period, endings: Iterable[Ending], windows: Sequence[Window]) -> list[str]:
    """Answers are right, calls end in time, and nobody is turned away without a cause; one line for each kind."""
    excuses = [one for one in windows if one.excuses]
    broken: dict[str, list[Ending]] = {}
    for one in endings:
        if what := _breach(period, one, excuses):
            broken.setdefault(what, []).append(one)
    return [
        f"{len(calls)} calls, first that of {calls[0].client} to {calls[0].model} at {calls[0].sent_s:.2f} s "
        f"(number {calls[0].number}), {what}: {calls[0].words[:400]}"
        for what, calls in broken.items()
    ]


def _breach(period: Period, one: Ending, excuses: Sequence[Window]) -> str:
    """What is not right about how a call ended; empty where it is."""
    scene = period.scene
    if one.outcome in _NEVER:
        return f"ended as {one.outcome}"
    if one.ended_s - one.sent_s > BOUND_S + 5.0:
        return f"took more than {BOUND_S + 5.0:g} s"
    if one.outcome == "invalid" and not one.asked_wrong:
        return "" if one.model in scene.away else "was right and was called wrong"
    is_excused = not excuses or any(window.overlaps(one.sent_s, one.ended_s) for window in excuses)
    if one.words.startswith(PARTLY):
        may_be = {"rejected", "deadline_exceeded", "failed"} & scene.may
        return "" if may_be and is_excused else "was answered in part without a cause"
    if one.outcome in ("success", "invalid", "left") or (one.outcome == "failed" and one.model in scene.away):
        return ""
    return "" if one.outcome in scene.may and is_excused else f"ended as {one.outcome} without a cause"


def count(endings: Iterable[Ending]) -> Calls:
    """What the clients counted."""
    return Counter((one.protocol, one.model, one.outcome) for one in endings)


def check_books(period: Period, seen: Calls, counted: Calls) -> list[str]:
    """Whether the server counted what its clients saw.

    A client that left, or lost its connection, cannot know how the call ended: each such call may be any one of the
    server's, or none. Models that come and go take their series with them.
    """
    if period.scene.loses_calls:
        return []
    breaches = []
    # A call to a model while it is away is counted under no name.
    changing = {*period.scene.changing, ""} if period.scene.changing else set()
    models = {(protocol, model) for protocol, model, _ in (*seen, *counted) if model not in changing}
    for protocol, model in sorted(models):
        # Over gRPC the model is in the message, which nobody may have read when its client leaves.
        theirs = {name for wire, name in models if wire == protocol} if (protocol, model) == ("grpc", "") else {model}
        unsure = sum(seen[protocol, name, how] for name in theirs for how in ("left", "broken"))
        more = {how: counted[protocol, model, how] - seen[protocol, model, how] for how in _COUNTED}
        if any(many < 0 for many in more.values()) or sum(max(0, many) for many in more.values()) > unsure:
            both = {how: (seen[protocol, model, how], counted[protocol, model, how]) for how in _COUNTED if more[how]}
            said = ", ".join(f"{how} {theirs} and {mine}" for how, (theirs, mine) in both.items())
            breaches.append(f"{protocol} {model}: clients saw and the server counted {said}; {unsure} lost or left")
    return breaches


def check_readers(period: Period, told: Readers) -> list[str]:
    """Whether all that is read of one ledger says the same of answered requests.

    To Triton's counters each file of a form is a request, so models of pictures are not compared. An answer that its
    client did not wait for is no answered call, though its model has computed it.
    """
    if period.scene.loses_calls or period.kind == "leavers":
        return []
    models = {model for _, model in told} - period.scene.changing - {"", "digits"}
    breaches = [f"{one} says nothing at all" for one in READERS if one not in {reader for reader, _ in told}]
    for model in sorted(models):
        counts = {reader: told[reader, model] for reader in READERS}
        if len(set(counts.values())) > 1:
            said = ", ".join(f"{count} {reader}" for reader, count in counts.items())
            breaches.append(f"{model}: readers of one ledger disagree about answered requests: {said}")
    return breaches


def check_rest(held: tuple[int, int, int] | None, before: ProcessState | None, now: ProcessState | None) -> list[str]:
    """Nothing in flight, and no descriptor or thread more than there was."""
    if held is None or before is None or now is None:
        return ["/stats is not answered after the period"]
    breaches = []
    if any(held):
        breaches.append(f"still held: {held[0]} samples wait, {held[1]} requests unfinished, {held[2]} bytes")
    for name, more in (("descriptors", MORE_DESCRIPTORS), ("threads", MORE_THREADS)):
        if getattr(now, name) > getattr(before, name) + more:
            breaches.append(f"the server has {getattr(now, name)} {name}, and had {getattr(before, name)}")
    return breaches


def check_memory(before: ProcessState | None, now: ProcessState | None) -> list[str]:
    """What the process holds for itself, against what it held after the warm-up."""
    if before is None or now is None or now.own_bytes - before.own_bytes <= MORE_OWN_BYTES:
        return []
    return [f"memory grew from {before.own_bytes / MIB:.0f} to {now.own_bytes / MIB:.0f} MiB"]


def check_ready(looks: Iterable[Readiness], windows: Sequence[Window], *, may: frozenset[str]) -> list[str]:
    """Ready means that requests are answered; and it is ready whenever nothing is done to it."""
    excuses = [window for window in windows if window.excuses]
    breaches = []
    for one in looks:
        if any(window.overlaps(one.began_s, one.ended_s) for window in excuses):
            continue
        if one.ready is not True:
            said = "gave no answer" if one.ready is None else f"said no: {one.words}"
            breaches.append(f"at {one.began_s:.2f} s readiness {said}, and nothing was done to the server")
        elif one.outcome != "success" and one.outcome not in may:
            breaches.append(
                f"at {one.began_s:.2f} s it was ready, and a real request ended as {one.outcome}: {one.words}"
            )
    return breaches


def check_log(log: str) -> list[str]:
    """Nothing that admits a bug; the first of them, with what stands around it."""
    found = [at for word in _ADMISSIONS if (at := log.find(word)) >= 0]
    return (
        [f"in the log: {' / '.join(log[max(0, min(found) - 200) : min(found) + 1200].splitlines())}"] if found else []
    )
