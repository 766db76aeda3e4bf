"""Decide which job to decode next and which to refuse: pure functions of a state and a given time.

There is no clock, thread, I/O or image here: a job is a number of units (pixels, bytes) of some kind. The rules:

1. Jobs run in the order of level (most urgent first), deadline, arrival.
2. One prediction covers everything ahead of a request: the wait, the decoding, and the time that the model's recent
   requests took after decoding. A job that would miss its deadline or its latest start is refused on arrival, or
   dropped when its turn comes. A margin of one sixteenth of the request's time allows for errors of the prediction. A
   job with nothing else waiting or running is always tried, so that a wrong prediction corrects itself.
3. One eighth of the time goes to the oldest job that has waited for more than a second, so that no job starves.
4. At most two full batches per engine are decoded ahead of a model.
5. A job that does not fit into memory waits until running jobs end. Smaller jobs may pass it during its first second.
   If nothing is being decoded, it is refused.
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
    """Something to decode.

    `arrival_ns` is when the job came here; `deadline_ns` is the deadline of the response, and `latest_start_ns` the
    latest start of its computation. `most_ahead` is how many samples of the model may be decoded and unanswered at
    once; 0 means that the job is not a sample. `level` is 1 for the most urgent requests and `queues.RAISED_LEVEL` for
    work that a request already depends on. `needs_bytes` is the memory that decoding takes.
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
        """The time after which decoding is pointless, or None."""
        return earliest_ns(self.deadline_ns, self.latest_start_ns)

    @property
    def place(self) -> Place:
        """The job's position in the order of service."""
        deadline_ns = NEVER_NS if self.deadline_ns is None else self.deadline_ns
        return (self.level, deadline_ns, self.arrival_ns, self.id, self)


# Sorted by the order of service: (level, deadline, arrival, id).
Place = tuple[int, int, int, int, DecodeJob]


@dataclass(slots=True, eq=False)
class DecodeLine:
    """The jobs that wait for one model, in order.

    `ahead` counts the samples that are being decoded or are not answered yet. `behind_ns` is the smoothed time from the
    end of decoding to the answer.
    """

    places: list[Place] = field(default_factory=list)
    ahead: int = 0
    most_ahead: int = 0
    behind_ns: float = 0.0

    @property
    def is_full(self) -> bool:
        """Whether the model has enough samples decoded ahead."""
        return 0 < self.most_ahead <= self.ahead


class Why(Enum):
    """Why a job is not decoded."""

    QUEUE_FULL = "queue_full"
    PREDICTED_LATE = "predicted_late"
    EXPIRED = "expired"
    HOPELESS = "hopeless"
    NO_ROOM = "no_room"


class NotDecoded(NamedTuple):
    """A job that was refused or dropped. A retry after `retry_after_ns` may succeed."""

    job: DecodeJob
    why: Why
    retry_after_ns: int = 0


@dataclass(slots=True, eq=False)
class Decoding:
    """The state of decoding on `threads` threads. `max_waiting` is in jobs.

    `waiting` maps ids to jobs in the order of arrival. `running` maps ids to the predicted end of each job. `owed_ns`
    is the decoding time that goes to other jobs before the next overdue job may jump the queue.
    """

    threads: int
    max_waiting: int
    costs: dict[str, LatencyModel] = field(default_factory=dict)
    lines: defaultdict[ModelKey | None, DecodeLine] = field(default_factory=lambda: defaultdict(DecodeLine))
    waiting: dict[int, DecodeJob] = field(default_factory=dict)
    running: dict[int, int] = field(default_factory=dict)
    owed_ns: int = 0

    def cost(self, kind: str) -> LatencyModel:
        """The cost model of a kind of job, by units. Starts from the cost of a small JPEG on a busy core."""
        if kind not in self.costs:
            self.costs[kind] = LatencyModel({units: 300_000 + 10 * units for units in (1, 1 << 26)})
        return self.costs[kind]

    @property
    def has_thread(self) -> bool:
        return len(self.running) < self.threads

    def work_ns(self, now_ns: int, before: list[Place]) -> int:
        """Predict how long all threads take for the running jobs and those in `before`."""
        running_ns = sum([max(0, until_ns - now_ns) for until_ns in self.running.values()])
        return (running_ns + sum([place[-1].predicted_ns for place in before])) // self.threads


# Takes the memory for a job. Returns False if there is not enough.
Reserve = Callable[[DecodeJob], bool]


def admit(state: Decoding, job: DecodeJob, now_ns: int) -> NotDecoded | None:
    """Queue the job, or return why it is refused."""
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
    """Return the job to start now, or a job to drop. Call until it returns None."""
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
    """Remove a waiting job."""
    _leave(state, job)
    _forget(state, job.key)


def ended(state: Decoding, job: DecodeJob, took_ns: int | None) -> None:
    """Record the end of a running job. Pass None as `took_ns` if the cost model cannot learn from it."""
    del state.running[job.id]
    if took_ns is not None:
        state.cost(job.kind).observe(max(1, job.units), took_ns)
    _forget(state, job.key)


def begin_here(state: Decoding, key: ModelKey, most_ahead: int) -> bool:
    """Return whether the caller may decode a sample inline now; if so, count it as ahead."""
    line = state.lines[key]
    line.most_ahead = most_ahead
    if line.places or line.is_full:
        return False
    line.ahead += 1
    return True


def answered(state: Decoding, key: ModelKey, took_ns: int | None) -> None:
    """Record the end of a decoded sample: `took_ns` from decoding to the answer, None if it got no answer."""
    line = state.lines[key]
    line.ahead -= 1
    if took_ns is not None:
        line.behind_ns += (took_ns - line.behind_ns) / 8 if line.behind_ns else took_ns
    _forget(state, key)


def _leave(state: Decoding, job: DecodeJob) -> None:
    places = state.lines[job.key].places
    del places[bisect_left(places, job.place)], state.waiting[job.id]


def _forget(state: Decoding, key: ModelKey | None) -> None:
    """Drop the model's line when it has no more jobs and samples."""
    line = state.lines[key]
    if not line.ahead and not line.places:
        del state.lines[key]


def _overdue(state: Decoding, now_ns: int) -> DecodeJob | None:
    """The oldest job that has waited for more than a second and may be decoded."""
    for job in state.waiting.values():
        if now_ns - job.arrival_ns < PATIENCE_NS:
            break
        if not state.lines[job.key].is_full:
            return job
    return None


def _passing(state: Decoding, lines: list[DecodeLine], now_ns: int, reserve: Reserve) -> DecodeJob | None:
    """The first job that fits into memory and may pass one that does not."""
    places = sorted(place for line in lines for place in islice(line.places, 16))
    fitting = (place[-1] for place in places if _given_up(state, place[-1], now_ns) is None and reserve(place[-1]))
    return next(fitting, None)


def _given_up(state: Decoding, job: DecodeJob, now_ns: int) -> NotDecoded | None:
    """Apply rule 2 to a job whose turn has come."""
    line = state.lines[job.key]
    is_alone = len(state.waiting) == 1 and not state.running and not line.ahead
    return _too_late(line, job, now_ns, now_ns, Why.HOPELESS, is_alone=is_alone)


def _too_late(
    line: DecodeLine, job: DecodeJob, now_ns: int, begins_ns: int, why: Why, *, is_alone: bool
) -> NotDecoded | None:
    """Apply rule 2: has the job expired, or would it be late if it began at `begins_ns`?"""
    late_ns, decoded_ns = 0, begins_ns + job.predicted_ns
    if job.expiry_ns is not None and job.expiry_ns <= now_ns:
        return NotDecoded(job, Why.EXPIRED)
    if job.latest_start_ns is not None:
        late_ns = decoded_ns - job.latest_start_ns
    if job.deadline_ns is not None:
        answered_ns = decoded_ns + (round(line.behind_ns) if line.ahead else 0)
        due_ns = (
            job.deadline_ns - (job.deadline_ns - job.arrival_ns) // 16
        )  # a margin, because predictions are not exact
        late_ns = max(late_ns, answered_ns - due_ns)
    return NotDecoded(job, why, late_ns) if late_ns > 0 and not is_alone else None


def _wait_ns(state: Decoding, line: DecodeLine, job: DecodeJob, now_ns: int) -> int:
    """Predict the wait for a thread, or for the model to answer samples that are ahead."""
    place = job.place
    ready = [other.places for other in state.lines.values() if not other.is_full]
    before = [one for places in ready for one in places[: bisect_left(places, place)]]
    wait_ns = state.work_ns(now_ns, before) if before or not state.has_thread else 0
    if not job.most_ahead:
        return wait_ns
    too_many = bisect_left(line.places, place) + line.ahead + 1 - job.most_ahead
    return max(wait_ns, round(line.behind_ns * max(0, too_many) / job.most_ahead))
