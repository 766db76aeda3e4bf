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
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import NamedTuple

from convoy.app.scheduling.latency import LatencyModel
from convoy.app.scheduling.policy import ONE_IN
from convoy.app.scheduling.queues import NEVER_NS, PATIENCE_NS
from convoy.app.scheduling.request import SECOND_NS, ModelKey, earliest_ns


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

    @property
    def place(self) -> Place:
        """Where it stands in the order of service."""
        deadline_ns = NEVER_NS if self.deadline_ns is None else self.deadline_ns
        return (self.level, deadline_ns, self.arrival_ns, self.id, self)


# Sorted by the order of service: (level, deadline, arrival, id).
Place = tuple[int, int, int, int, DecodeJob]


@dataclass(slots=True, eq=False)
class DecodeLine:
    """What waits for one model, in order. `ahead` are its samples that are being decoded or unanswered.

    `behind_ns`: what its last answers took from there.
    """

    places: list[Place] = field(default_factory=list)
    ahead: int = 0
    most_ahead: int = 0
    behind_ns: float = 0.0

    @property
    def is_full(self) -> bool:
        """Whether enough is ahead."""
        return 0 < self.most_ahead <= self.ahead


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


@dataclass(slots=True, eq=False)
class Decoding:
    """All that waits and is decoded, for a number of threads. `max_waiting` in jobs.

    `waiting` has the jobs by their ids, as they came; `running` when those that are decoded are predicted to be done.
    The others are owed `owed_ns` before an overdue job goes first again.
    """

    threads: int
    max_waiting: int
    costs: dict[str, LatencyModel] = field(default_factory=dict)
    lines: defaultdict[ModelKey | None, DecodeLine] = field(default_factory=lambda: defaultdict(DecodeLine))
    waiting: dict[int, DecodeJob] = field(default_factory=dict)
    running: dict[int, int] = field(default_factory=dict)
    owed_ns: int = 0

    def cost(self, kind: str) -> LatencyModel:
        """What jobs of a kind take, by their units; at first a JPEG for a network's 224x224, on a busy core."""
        if kind not in self.costs:
            self.costs[kind] = LatencyModel({units: 300_000 + 10 * units for units in (1, 1 << 26)})
        return self.costs[kind]

    @property
    def has_thread(self) -> bool:
        return len(self.running) < self.threads

    def work_ns(self, now_ns: int, before: list[Place]) -> int:
        """How long all threads take, as predicted, for what is being decoded and for what goes before."""
        running_ns = sum([max(0, until_ns - now_ns) for until_ns in self.running.values()])
        return (running_ns + sum([place[-1].predicted_ns for place in before])) // self.threads


# Whether there is memory for a job, which is then taken.
Reserve = Callable[[DecodeJob], bool]


def admit(state: Decoding, job: DecodeJob, now_ns: int) -> NotDecoded | None:
    """Let the job wait, or say why not."""
    job.predicted_ns = state.cost(job.kind).expect_ns(max(1, job.units))
    line = state.lines[job.key]
    line.most_ahead = job.most_ahead
    refusal = _refusal(state, line, job, now_ns)
    if refusal is None:
        insort(line.places, job.place)
        state.waiting[job.id] = job
    else:
        _forget(state, job.key)
    return refusal


def _refusal(state: Decoding, line: DecodeLine, job: DecodeJob, now_ns: int) -> NotDecoded | None:
    is_next = state.has_thread and not line.places and not line.is_full
    if len(state.waiting) >= state.max_waiting and not is_next and job.level:
        everything = [place for other in state.lines.values() for place in other.places]
        return NotDecoded(job, Why.QUEUE_FULL, state.work_ns(now_ns, everything))
    begins_ns = now_ns + _wait_ns(state, line, job, now_ns)
    is_alone = not state.waiting and not state.running and not line.ahead
    return _too_late(line, job, now_ns, begins_ns, Why.PREDICTED_LATE, is_alone=is_alone)


def decide(state: Decoding, now_ns: int, reserve: Reserve) -> DecodeJob | NotDecoded | None:
    """What to decode now in a thread that is free, or what not to decode; call until it is None."""
    lines = [line for line in state.lines.values() if line.places and not line.is_full]
    if not lines or not state.has_thread:
        return None
    first = min(line.places[0] for line in lines)[-1]
    overdue = _overdue(state, now_ns) if state.owed_ns <= 0 and first.level else None
    job: DecodeJob | None = overdue or first
    assert job is not None
    refusal = _given_up(state, job, now_ns)
    if refusal is None and not reserve(job):
        if state.running:
            job = _passing(state, lines, now_ns, reserve) if now_ns - job.arrival_ns < PATIENCE_NS else None
        else:
            refusal = NotDecoded(job, Why.NO_ROOM, SECOND_NS)
    if refusal is not None:
        withdraw(state, refusal.job)
    if refusal is not None or job is None:
        return refusal
    is_out_of_turn = job is overdue and job is not first
    state.owed_ns = (ONE_IN - 1) * job.predicted_ns if is_out_of_turn else max(0, state.owed_ns - job.predicted_ns)
    _leave(state, job)
    state.lines[job.key].ahead += job.most_ahead > 0
    state.running[job.id] = now_ns + job.predicted_ns
    return job


def withdraw(state: Decoding, job: DecodeJob) -> None:
    """Take out a job that waits."""
    _leave(state, job)
    _forget(state, job.key)


def ended(state: Decoding, job: DecodeJob, took_ns: int | None) -> None:
    """A job that was begun has left its thread; None: it was not decoded, or nothing can be learned from it."""
    del state.running[job.id]
    if took_ns is not None:
        state.cost(job.kind).observe(max(1, job.units), took_ns)
    _forget(state, job.key)


def begin_here(state: Decoding, key: ModelKey, most_ahead: int) -> bool:
    """Whether the caller may decode a sample itself, now: it counts as ahead then. Else it waits like the others."""
    line = state.lines[key]
    line.most_ahead = most_ahead
    if line.places or line.is_full:
        return False
    line.ahead += 1
    return True


def answered(state: Decoding, key: ModelKey, took_ns: int | None) -> None:
    """A decoded sample needs nothing more: it has its answer, `took_ns` after it was decoded, or gets none."""
    line = state.lines[key]
    line.ahead -= 1
    if took_ns is not None:
        line.behind_ns += (took_ns - line.behind_ns) / 8 if line.behind_ns else took_ns
    _forget(state, key)


def _leave(state: Decoding, job: DecodeJob) -> None:
    places = state.lines[job.key].places
    del places[bisect_left(places, job.place)], state.waiting[job.id]


def _forget(state: Decoding, key: ModelKey | None) -> None:
    """Forget what a model takes with its last request; the next one measures it anew."""
    line = state.lines[key]
    if not line.ahead and not line.places:
        del state.lines[key]


def _overdue(state: Decoding, now_ns: int) -> DecodeJob | None:
    """The oldest that has waited for a second and may be decoded."""
    for job in state.waiting.values():
        if now_ns - job.arrival_ns < PATIENCE_NS:
            break
        if not state.lines[job.key].is_full:
            return job
    return None


def _passing(state: Decoding, lines: list[DecodeLine], now_ns: int, reserve: Reserve) -> DecodeJob | None:
    """The first of those that may pass one that does not fit."""
    places = sorted(place for line in lines for place in islice(line.places, 16))
    fitting = (place[-1] for place in places if _given_up(state, place[-1], now_ns) is None and reserve(place[-1]))
    return next(fitting, None)


def _given_up(state: Decoding, job: DecodeJob, now_ns: int) -> NotDecoded | None:
    """By rule 2, when its turn has come."""
    line = state.lines[job.key]
    is_alone = len(state.waiting) == 1 and not state.running and not line.ahead
    return _too_late(line, job, now_ns, now_ns, Why.HOPELESS, is_alone=is_alone)


def _too_late(
    line: DecodeLine, job: DecodeJob, now_ns: int, begins_ns: int, why: Why, *, is_alone: bool
) -> NotDecoded | None:
    """Whether it has expired, or is predicted to be late, by rule 2, if it begins then; one that is alone is tried."""
    late_ns, decoded_ns = 0, begins_ns + job.predicted_ns
    if job.expiry_ns is not None and job.expiry_ns <= now_ns:
        return NotDecoded(job, Why.EXPIRED)
    if job.latest_start_ns is not None:
        late_ns = decoded_ns - job.latest_start_ns
    if job.deadline_ns is not None:
        answered_ns = decoded_ns + (round(line.behind_ns) if line.ahead else 0)
        due_ns = job.deadline_ns - (job.deadline_ns - job.arrival_ns) // 16  # predictions are not exact
        late_ns = max(late_ns, answered_ns - due_ns)
    return NotDecoded(job, why, late_ns) if late_ns > 0 and not is_alone else None


def _wait_ns(state: Decoding, line: DecodeLine, job: DecodeJob, now_ns: int) -> int:
    """Until its turn: jobs before it have the threads, or its model must answer them first."""
    place = job.place
    ready = [other.places for other in state.lines.values() if not other.is_full]
    before = [one for places in ready for one in places[: bisect_left(places, place)]]
    wait_ns = state.work_ns(now_ns, before) if before or not state.has_thread else 0
    if not job.most_ahead:
        return wait_ns
    too_many = bisect_left(line.places, place) + line.ahead + 1 - job.most_ahead
    return max(wait_ns, round(line.behind_ns * max(0, too_many) / job.most_ahead))
