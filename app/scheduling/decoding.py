"""What is decoded next, and what never is: pure decisions over a state, at a time that is given.

No clock, no thread, no I/O, and no image: a job is a number of units (pixels, bytes) of a kind. The rules:

1. The most urgent level goes first, within it the earliest deadline, then the earliest arrival.
2. One prediction covers all that a request has before it: its wait, its decoding, and what its model's last answers
   took from there. A job that cannot be in time is refused, or given up when its turn has come; so is one that would
   not be decoded by its latest start. In time is what leaves a sixteenth of its time, because predictions are not
   exact. Where no other job waits or is decoded the job is tried, so that a wrong prediction always recovers.
3. One part in eight of the time is for the oldest job that has waited for a second while others went first.
4. Of a model's samples two full batches for each of its engines are decoded ahead, and no more.
5. A job that does not fit into the memory waits for those that are being decoded. Others that fit may pass it until it
   has waited for a second. Where nothing is being decoded, it is refused.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import NamedTuple

from convoy.app.scheduling.patience import ONE_BATCH_IN
from convoy.app.scheduling.queues import NEVER_NS, PATIENCE_NS
from convoy.app.scheduling.request import SECOND_NS, ModelKey, earliest_ns

_LEARN = 1 / 8


class DecodeCost:
    """What jobs of one kind take: a fixed part, and so much a unit; nanoseconds. It begins as measured elsewhere."""

    def __init__(self, fixed_ns: float, unit_ns: float) -> None:
        self.fixed_ns, self.unit_ns = self._scale = fixed_ns, unit_ns

    def predict_ns(self, units: int) -> int:
        return int(self.fixed_ns + self.unit_ns * units)

    def observe(self, units: int, took_ns: int) -> None:
        """Learn from one, a part of the error (normalised least mean squares: Nagumo and Noda, 1967)."""
        expected = self.fixed_ns + self.unit_ns * units
        fixed, each = self._scale[0], self._scale[1] * units
        # At most four times as long counts: a machine that stood still for a while must not be learned from.
        step = _LEARN * (min(took_ns, 4 * expected) - expected) / (fixed * fixed + each * each)
        self.fixed_ns = max(1.0, self.fixed_ns + step * fixed * fixed)
        self.unit_ns = max(0.0, self.unit_ns + step * each * self._scale[1])


# By kind, as measured on a busy core, to a network's 224x224; what is not named begins as the last one.
_MEASURED: dict[str, tuple[float, float]] = {
    "JPEG": (300e3, 10),
    "PNG": (300e3, 40),
    "WebP": (300e3, 20),
    "GIF": (300e3, 12),
    "BMP": (300e3, 5),
    "TIFF": (300e3, 8),
    "": (100e3, 5),
}


@dataclass(slots=True, eq=False)
class DecodeJob:
    """Something to decode. `arrival_ns`: when it came here; `deadline_ns`: of the answer that it is for.

    `most_ahead`: how many samples of its model may be decoded and not yet answered; 0: it is no sample. `level` is 1
    for the most urgent, and `queues.RAISED_LEVEL` for what is owed already. `needs_bytes`: memory while it is decoded.
    `latest_start_ns`: what it is for must be computed from then on, or not at all.
    """

    id: int
    kind: str
    units: int
    arrival_ns: int
    deadline_ns: int | None = None
    key: ModelKey | None = None
    most_ahead: int = 0
    level: int = 1
    needs_bytes: int = 0
    latest_start_ns: int | None = None
    predicted_ns: int = 0

    @property
    def expiry_ns(self) -> int | None:
        """When there is no more use in decoding it."""
        return earliest_ns(self.deadline_ns, self.latest_start_ns)

    def late_ns(self, decoded_ns: int, end_ns: int) -> int:
        """How much too late it is, by rule 2, where it is decoded and answered then; nothing where it is in time."""
        late_ns = 0
        if self.latest_start_ns is not None:
            late_ns = max(late_ns, decoded_ns - self.latest_start_ns)
        if self.deadline_ns is not None:
            due_ns = self.deadline_ns - (self.deadline_ns - self.arrival_ns) // 16  # predictions are not exact
            late_ns = max(late_ns, end_ns - due_ns)
        return late_ns


# Sorted by the order of service: (level, deadline, arrival, id).
_Place = tuple[int, int, int, int, DecodeJob]


def _place(job: DecodeJob) -> _Place:
    deadline_ns = NEVER_NS if job.deadline_ns is None else job.deadline_ns
    return (job.level, deadline_ns, job.arrival_ns, job.id, job)


@dataclass(slots=True, eq=False)
class DecodeLine:
    """What waits for one model: in order, and by age. `ahead` are its samples that are being decoded or unanswered.

    `behind_ns`: what its last answers took from there.
    """

    places: list[_Place] = field(default_factory=list)
    by_age: OrderedDict[int, DecodeJob] = field(default_factory=OrderedDict)
    ahead: int = 0
    most_ahead: int = 0
    behind_ns: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether its first may be decoded."""
        return bool(self.places) and not 0 < self.most_ahead <= self.ahead


class Why(Enum):
    """Why a job is not decoded."""

    QUEUE_FULL = "queue_full"
    PREDICTED_LATE = "predicted_late"
    EXPIRED = "expired"
    HOPELESS = "hopeless"
    NO_ROOM = "no_room"


class NotDecoded(NamedTuple):
    """The job does not wait (any more). A retry after `retry_after_ns` has a chance if no others come."""

    job: DecodeJob
    why: Why
    retry_after_ns: int = 0


class Begin(NamedTuple):
    """Decode this in the next thread that is free."""

    job: DecodeJob


@dataclass(slots=True, eq=False)
class Decoding:
    """All that waits and is decoded, for a number of threads. `max_waiting` in jobs."""

    threads: int
    max_waiting: int
    costs: dict[str, DecodeCost] = field(default_factory=dict)
    lines: defaultdict[ModelKey | None, DecodeLine] = field(default_factory=lambda: defaultdict(DecodeLine))
    running: dict[int, int] = field(default_factory=dict)  # by job: when it is predicted to be decoded
    waiting: int = 0
    owed_ns: int = 0  # to the others, before one that is overdue goes first again

    def cost(self, kind: str) -> DecodeCost:
        found = self.costs.get(kind)
        if found is None:
            found = self.costs[kind] = DecodeCost(*_MEASURED.get(kind, _MEASURED[""]))
        return found

    @property
    def has_thread(self) -> bool:
        return len(self.running) < self.threads

    def running_ns(self, now_ns: int) -> int:
        """What all that is being decoded still takes, as predicted."""
        return sum([max(0, until_ns - now_ns) for until_ns in self.running.values()])


# Whether there is memory for a job, which is then taken.
Reserve = Callable[[DecodeJob], bool]


def admit(state: Decoding, job: DecodeJob, now_ns: int) -> NotDecoded | None:
    """Let the job wait, or say why not."""
    job.predicted_ns = state.cost(job.kind).predict_ns(job.units)
    line = state.lines[job.key]
    line.most_ahead = job.most_ahead
    refusal = _refusal(state, line, job, now_ns)
    if refusal is not None:
        _forget(state, job.key)
        return refusal
    insort(line.places, _place(job))
    line.by_age[job.id] = job
    state.waiting += 1
    return None


def _refusal(state: Decoding, line: DecodeLine, job: DecodeJob, now_ns: int) -> NotDecoded | None:
    is_next = state.has_thread and not line.places and not 0 < line.most_ahead <= line.ahead
    if state.waiting >= state.max_waiting and not is_next and job.level:
        return NotDecoded(job, Why.QUEUE_FULL, _backlog_ns(state, now_ns))
    expiry_ns = job.expiry_ns
    if expiry_ns is not None:
        if expiry_ns <= now_ns:
            return NotDecoded(job, Why.EXPIRED)
        late_ns = _late_ns(line, job, now_ns + _wait_ns(state, line, job, now_ns))
        if late_ns and (state.waiting or state.running or line.ahead):
            return NotDecoded(job, Why.PREDICTED_LATE, late_ns)
    return None


def decide(state: Decoding, now_ns: int, reserve: Reserve) -> Begin | NotDecoded | None:
    """The next thing to do; call until it is None."""
    lines = [line for line in state.lines.values() if line.is_open]
    if not lines or not state.has_thread:
        return None
    job = first = min(line.places[0] for line in lines)[-1]
    oldest = min((next(iter(line.by_age.values())) for line in lines), key=lambda one: one.arrival_ns)
    is_overdue = oldest is not first and now_ns - oldest.arrival_ns >= PATIENCE_NS
    if is_overdue and state.owed_ns <= 0 and first.level:
        job = oldest
    if why := _given_up(state, job, now_ns):
        withdraw(state, job)
        return NotDecoded(job, why)
    if not reserve(job):
        if not state.running:
            withdraw(state, job)
            return NotDecoded(job, Why.NO_ROOM, SECOND_NS)
        fitting = () if now_ns - job.arrival_ns >= PATIENCE_NS else _behind(state, lines, now_ns)
        if (passing := next((one for one in fitting if reserve(one)), None)) is None:
            return None
        job = passing
    if job is oldest and job is not first:
        state.owed_ns = (ONE_BATCH_IN - 1) * job.predicted_ns
    else:
        state.owed_ns = max(0, state.owed_ns - job.predicted_ns)
    _leave(state, job)
    state.lines[job.key].ahead += job.most_ahead > 0
    state.running[job.id] = now_ns + job.predicted_ns
    return Begin(job)


def withdraw(state: Decoding, job: DecodeJob) -> None:
    """Nobody waits for the job any more; it has not begun."""
    _leave(state, job)
    _forget(state, job.key)


def ended(state: Decoding, job: DecodeJob, took_ns: int | None) -> None:
    """A job that was begun has left its thread; None: it was not decoded, or nothing can be learned from it."""
    del state.running[job.id]
    if took_ns is not None:
        state.cost(job.kind).observe(job.units, took_ns)
    _forget(state, job.key)


def begin_here(state: Decoding, key: ModelKey, most_ahead: int) -> bool:
    """Whether the caller may decode a sample itself, now: it counts as ahead then. Else it waits like the others."""
    line = state.lines[key]
    line.most_ahead = most_ahead
    if line.places or line.ahead >= most_ahead:
        return False
    line.ahead += 1
    return True


def answered(state: Decoding, key: ModelKey, took_ns: int | None) -> None:
    """A decoded sample needs nothing more: it has its answer, `took_ns` after it was decoded, or gets none."""
    line = state.lines[key]
    line.ahead -= 1
    if took_ns is not None:
        line.behind_ns += (took_ns - line.behind_ns) * _LEARN if line.behind_ns else took_ns
    _forget(state, key)


def _leave(state: Decoding, job: DecodeJob) -> None:
    line = state.lines[job.key]
    del line.places[bisect_left(line.places, _place(job)[:-1])], line.by_age[job.id]
    state.waiting -= 1


def _forget(state: Decoding, key: ModelKey | None) -> None:
    """Forget what a model takes with its last request; the next one measures it anew."""
    line = state.lines[key]
    if not line.ahead and not line.places:
        del state.lines[key]


def _given_up(state: Decoding, job: DecodeJob, now_ns: int) -> Why | None:
    """By rule 2, when its turn has come."""
    expiry_ns = job.expiry_ns
    if expiry_ns is None or not job.level:
        return None
    if expiry_ns <= now_ns:
        return Why.EXPIRED
    line, is_alone = state.lines[job.key], state.waiting == 1 and not state.running
    if _late_ns(line, job, now_ns) and not (is_alone and not line.ahead):
        return Why.HOPELESS
    return None


def _late_ns(line: DecodeLine, job: DecodeJob, begins_ns: int) -> int:
    """How much too late it is predicted to be, by rule 2, if it begins then."""
    decoded_ns = begins_ns + job.predicted_ns
    return job.late_ns(decoded_ns, decoded_ns + (round(line.behind_ns) if line.ahead else 0))


def _wait_ns(state: Decoding, line: DecodeLine, job: DecodeJob, now_ns: int) -> int:
    """Until its turn: jobs before it have the threads, or its model must answer them first."""
    place = _place(job)
    before = [other.places[: bisect_left(other.places, place)] for other in state.lines.values() if other.is_open]
    work_ns = sum(one[-1].predicted_ns for places in before for one in places)
    wait_ns = 0 if state.has_thread and not work_ns else (state.running_ns(now_ns) + work_ns) // state.threads
    if not job.most_ahead:
        return wait_ns
    too_many = bisect_left(line.places, place) + line.ahead + 1 - job.most_ahead
    return max(wait_ns, round(line.behind_ns * max(0, too_many) / job.most_ahead))


def _backlog_ns(state: Decoding, now_ns: int) -> int:
    waiting_ns = sum(place[-1].predicted_ns for line in state.lines.values() for place in line.places)
    return (state.running_ns(now_ns) + waiting_ns) // state.threads


def _behind(state: Decoding, lines: list[DecodeLine], now_ns: int) -> Iterator[DecodeJob]:
    """Who might pass one that does not fit."""
    places = sorted(place for line in lines for place in islice(line.places, 16))
    return (place[-1] for place in places if _given_up(state, place[-1], now_ns) is None)
