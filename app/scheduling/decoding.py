"""What is decoded next, and what never is: pure decisions over a state, at a time that is given.

No clock, no thread, no I/O, and no image: a job is so many units (pixels, bytes) of a kind. The rules:

 1. One prediction over all that a request has before it: its wait, its decoding, and what its model's last answers
    took from there. Who cannot be in time by it is refused, or given up when its turn has come; so is who would not be
    decoded by the time by which it is to be computed, where it names one. In time is what leaves
    a sixteenth of the time that it was given: where too much comes, of equal ones those are served that have waited
    nearly all of it; half would be later than predicted, and an answer is on its way for some time, too. Where nobody
    else waits or is decoded it is tried, and what a model takes counts only while answers of it are due: so a
    prediction that was wrong for a while always recovers.
 2. The most urgent level goes first. Within it those that are small: by powers of two of what their kind took where it
    was measured first. What is learned has no say in that, or of equal ones those that came before it crossed a power
    of two would wait for all that come after. About equal ones go by deadline and arrival.
 3. One part in eight of the time is for who has waited for a second while others went first, the oldest of them.
 4. Of a model's samples so many are decoded ahead and no more: two full batches for each of its engines.
 5. What does not fit into the memory waits for those that are being decoded; who is shorter and fits may pass, but
    nobody passes who has waited for a second. Where nothing is being decoded, it is refused.
 6. Short ones share a hand-over to a thread, as long as all of them together are short.
 7. Where engines compute on the same cores, half of the threads rest while a model has one of its two batches: it needs
    the cores more than the next image does. One that has less gets all, so that no core is idle for it.
 8. Where all threads that may work have long ones, a short one is decoded beside them, by a thread more; one hand-over
    at a time. The cores are shared by all of them meanwhile, which costs the long ones little, and a short one would
    else wait for what takes a hundred times as long. What is short is not learned either: all that share the cores
    take longer then, and would else wait for it.
 9. Where engines compute on the same cores and others come as well, long ones leave one thread free: on its way through
    the server a small image goes from thread to thread six times, and each time waits for a core where none is idle.
10. Where all that is decoded is short, each thread is given its next hand-over before it has ended the last, if that is
    short as well: it need not wait between two images until the event loop has come by, which has much to do then. So
    long, at most, who comes meanwhile and is more urgent stands behind it. Not while a model rests by rule 7.

Shortest first is what makes the mean wait least (Smith, 1956); it does so by predictions, too, that are off by less
than the sizes differ (Mitzenmacher, ITCS 2020, "Scheduling with predictions and the price of misprediction"), and sizes
here differ ten-thousandfold. Who is large then waits for the others; a part of the time for the oldest bounds that, as
ageing does (and `patience` for batches), whatever comes.
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

# Handing a job to a thread and back costs some tenths of this.
SHARED_NS = 500_000
# By rules 8 and 9.
LONG_NS = 10_000_000
SHORT_NS = LONG_NS // 4
# Who has come so lately is not the last of them.
COMPANY_NS = 100_000_000
_SPARE_PART = 16
_LEARN = 1 / 8
# What stood still for a while (a machine that was suspended, a core that others used) must not be learned from.
_MOST_TIMES_LONGER = 4
# Behind one that does not fit, so many of each model are looked at.
_LOOK_BEHIND = 16
# Models that nothing waits for, which cost more to make anew than to look at.
_MOST_AT_REST = 64


class DecodeCost:
    """What jobs of one kind take: a fixed part, and so much a unit; nanoseconds. It begins as measured elsewhere."""

    def __init__(self, fixed_ns: float, unit_ns: float) -> None:
        self.fixed_ns, self.unit_ns = self._scale = fixed_ns, unit_ns

    def predict_ns(self, units: int) -> int:
        return int(self.fixed_ns + self.unit_ns * units)

    def usual_ns(self, units: int) -> int:
        """What such a job took before anything was learned."""
        return int(self._scale[0] + self._scale[1] * units)

    def observe(self, units: int, took_ns: int) -> None:
        """Learn from one, a part of the error (normalised least mean squares: Nagumo and Noda, 1967)."""
        expected = self.fixed_ns + self.unit_ns * units
        fixed, each = self._scale[0], self._scale[1] * units
        step = _LEARN * (min(took_ns, _MOST_TIMES_LONGER * expected) - expected) / (fixed * fixed + each * each)
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

    `most_ahead`: so many samples of its model may be decoded and not yet answered; 0: it is no sample. `level` is 1
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
    usual_ns: int = 0

    @property
    def is_long(self) -> bool:
        return self.usual_ns >= LONG_NS

    @property
    def is_short(self) -> bool:
        return self.usual_ns <= SHORT_NS

    @property
    def is_short_now(self) -> bool:
        """Whether it is short where it is decoded among others, too, which takes longer."""
        return self.is_short and self.predicted_ns < LONG_NS

    @property
    def expiry_ns(self) -> int | None:
        """When there is no more use in decoding it."""
        return earliest_ns(self.deadline_ns, self.latest_start_ns)

    def late_ns(self, decoded_ns: int, end_ns: int) -> int:
        """How much too late it is, by rule 1, where it is decoded and answered then; nothing where it is in time."""
        late_ns = 0
        if self.latest_start_ns is not None:
            late_ns = max(late_ns, decoded_ns - self.latest_start_ns)
        if self.deadline_ns is not None:
            due_ns = self.deadline_ns - (self.deadline_ns - self.arrival_ns) // _SPARE_PART
            late_ns = max(late_ns, end_ns - due_ns)
        return late_ns


# Sorted by the order of service: (level, size as a power of two, deadline, arrival, id).
_Place = tuple[int, int, int, int, int, DecodeJob]


def _place(job: DecodeJob) -> _Place:
    deadline_ns = NEVER_NS if job.deadline_ns is None else job.deadline_ns
    return (job.level, job.usual_ns.bit_length(), deadline_ns, job.arrival_ns, job.id, job)


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
    """The job does not wait, or no more. After `retry_after_ns` another would have a chance if nobody else came."""

    job: DecodeJob
    why: Why
    retry_after_ns: int = 0


class Begin(NamedTuple):
    """Decode these, one after the other, in one thread: the next that is free, or the one beside them by rule 8."""

    jobs: tuple[DecodeJob, ...]
    is_beside: bool = False


@dataclass(slots=True, eq=False)
class HandOver:
    """What a thread has been given, and when it is predicted to be done; `is_beside` by rule 8."""

    left: int
    until_ns: int
    total_ns: int
    is_short: bool
    is_beside: bool

    def left_ns(self, now_ns: int) -> int:
        """What it still takes, whether it has begun or not."""
        return max(0, min(self.total_ns, self.until_ns - now_ns))


@dataclass(slots=True, eq=False)
class Decoding:
    """All that waits and is decoded, for so many threads. `max_waiting` in jobs.

    `shares_cores`: with engines.
    """

    threads: int
    max_waiting: int
    shares_cores: bool = False
    costs: dict[str, DecodeCost] = field(default_factory=dict)
    lines: defaultdict[ModelKey | None, DecodeLine] = field(default_factory=lambda: defaultdict(DecodeLine))
    running: dict[int, HandOver] = field(default_factory=dict)  # by job; those of one hand-over share theirs
    busy: int = 0  # hand-overs, but for the one beside them: threads, and what is behind them by rule 10
    is_busy_beside: bool = False
    waiting: int = 0
    owed_ns: int = 0  # to the others, before one that is overdue goes first again
    company_until_ns: int = -1  # by rule 9, so long after the last that was not long

    def cost(self, kind: str) -> DecodeCost:
        found = self.costs.get(kind)
        if found is None:
            found = self.costs[kind] = DecodeCost(*_MEASURED.get(kind, _MEASURED[""]))
        return found

    @property
    def has_thread(self) -> bool:
        """By rule 7."""
        if self.busy >= self.threads or not self.busy:
            return self.busy < self.threads
        return not self.is_fed or self.busy < self.threads // 2

    @property
    def is_fed(self) -> bool:
        """Whether a model has one of its two batches, and its engines the same cores, by rule 7."""
        return self.shares_cores and any(0 < line.most_ahead <= 2 * line.ahead for line in self.lines.values())

    def takes_beside(self, job: DecodeJob) -> bool:
        """Whether the job is one of those that need not wait for a thread, by rule 8."""
        if not job.is_short or self.has_thread:
            return False
        return all(one.total_ns >= LONG_NS for one in self.running.values() if not one.is_beside)

    @property
    def takes_behind(self) -> bool:
        """Whether a thread may have something short behind what it has, by rule 10."""
        if not self.threads <= self.busy < 2 * self.threads or self.is_fed:
            return False
        return all(one.is_short for one in self.running.values())

    def thread_ns(self, now_ns: int) -> int:
        """When the next hand-over begins behind those that all threads have, as predicted."""
        each = {id(one): one.until_ns for one in self.running.values() if not one.is_beside}
        return max(now_ns, sorted(each.values())[self.busy - self.threads])

    def threads_for(self, job: DecodeJob, now_ns: int) -> int:
        """How many may have such a job, by rule 9."""
        is_in_company = self.shares_cores and job.is_long and now_ns < self.company_until_ns
        return max(1, self.threads - 1) if is_in_company else self.threads

    def takes(self, job: DecodeJob, now_ns: int) -> bool:
        """Whether the job need not leave the next thread to others, by rule 9."""
        threads = self.threads_for(job, now_ns)
        return threads == self.threads or sum(one.total_ns >= LONG_NS for one in self.running.values()) < threads


# Whether there is memory for a job, which is then taken.
Reserve = Callable[[DecodeJob], bool]


def admit(state: Decoding, job: DecodeJob, now_ns: int) -> NotDecoded | None:
    """Let the job wait, or say why not."""
    cost = state.cost(job.kind)
    job.predicted_ns, job.usual_ns = cost.predict_ns(job.units), cost.usual_ns(job.units)
    if job.level and not job.is_long:
        state.company_until_ns = now_ns + COMPANY_NS
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
    is_next = state.has_thread and state.takes(job, now_ns)
    is_next = is_next and not line.places and not 0 < line.most_ahead <= line.ahead
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
    lines = [line for line in state.lines.values() if line.is_open and state.takes(line.places[0][-1], now_ns)]
    is_behind = is_beside = False
    if not state.has_thread and not (is_behind := state.takes_behind):
        is_beside = True
        lines = [] if state.is_busy_beside else [one for one in lines if state.takes_beside(one.places[0][-1])]
    if not lines:
        return None
    job = first = min(line.places[0] for line in lines)[-1]
    oldest = min((next(iter(line.by_age.values())) for line in lines), key=lambda one: one.arrival_ns)
    if (
        oldest is not first
        and not is_beside
        and now_ns - oldest.arrival_ns >= PATIENCE_NS
        and state.owed_ns <= 0
        and first.level
        and state.takes(oldest, now_ns)
    ):
        job = oldest
    if is_behind and not job.is_short_now:
        return None
    begins_ns = state.thread_ns(now_ns) if is_behind else now_ns
    if why := _given_up(state, job, now_ns, begins_ns):
        withdraw(state, job)
        return NotDecoded(job, why)
    if not reserve(job):
        if is_beside or is_behind:
            return None
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
    return _begin(state, job, now_ns, begins_ns, reserve, is_beside=is_beside)


def _begin(state: Decoding, job: DecodeJob, now_ns: int, begins_ns: int, reserve: Reserve, *, is_beside: bool) -> Begin:
    """The job, and those behind it that share its hand-over."""
    jobs, total_ns = [job], job.predicted_ns
    _go(state, job)
    while total_ns < SHARED_NS:
        heads = [line.places[0] for line in state.lines.values() if line.is_open]
        other = min(heads)[-1] if heads else None
        if other is None or total_ns + other.predicted_ns > SHARED_NS:
            break
        if _given_up(state, other, now_ns, begins_ns) or not reserve(other):
            break
        _go(state, other)
        jobs.append(other)
        total_ns += other.predicted_ns
    is_short = all(one.is_short_now for one in jobs)
    running = HandOver(len(jobs), begins_ns + total_ns, total_ns, is_short, is_beside)
    for one in jobs:
        state.running[one.id] = running
    if is_beside:
        state.is_busy_beside = True
    else:
        state.busy += 1
    return Begin(tuple(jobs), is_beside)


def _go(state: Decoding, job: DecodeJob) -> None:
    _leave(state, job)
    state.lines[job.key].ahead += job.most_ahead > 0


def withdraw(state: Decoding, job: DecodeJob) -> None:
    """Nobody waits for the job any more; it has not begun."""
    _leave(state, job)
    _forget(state, job.key)


def ended(state: Decoding, job: DecodeJob, took_ns: int | None) -> None:
    """A job that was begun has left its thread; None: it was not decoded, or nothing can be learned from it."""
    running = state.running.pop(job.id)
    running.left -= 1
    if not running.left and running.is_beside:
        state.is_busy_beside = False
    elif not running.left:
        state.busy -= 1
    if took_ns is not None:
        state.cost(job.kind).observe(job.units, took_ns)
    _forget(state, job.key)


def begin_here(state: Decoding, key: ModelKey, most_ahead: int, now_ns: int, is_short: Callable[[], bool]) -> bool:
    """Whether a sample may be decoded at once, by who asks: it is ahead then. Else it waits like the others.

    `is_short` is asked only where that decides it.
    """
    line = state.lines[key]
    line.most_ahead = most_ahead
    if line.places or line.ahead >= most_ahead or not is_short():
        return False
    state.company_until_ns = now_ns + COMPANY_NS
    line.ahead += 1
    return True


def answered(state: Decoding, key: ModelKey, took_ns: int | None) -> None:
    """A sample that was begun needs nothing more: it has its answer, so long after it was decoded, or gets none."""
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
    """What a model takes is forgotten with its last request: who is alone finds it out anew."""
    line = state.lines[key]
    if not line.ahead and not line.places:
        line.behind_ns = 0.0
        if len(state.lines) > _MOST_AT_REST:
            del state.lines[key]


def _given_up(state: Decoding, job: DecodeJob, now_ns: int, begins_ns: int) -> Why | None:
    """By rule 1, when its turn has come, and it begins then."""
    expiry_ns = job.expiry_ns
    if expiry_ns is None or not job.level:
        return None
    if expiry_ns <= now_ns:
        return Why.EXPIRED
    line, is_alone = state.lines[job.key], state.waiting == 1 and not state.running
    if _late_ns(line, job, begins_ns) and not (is_alone and not line.ahead):
        return Why.HOPELESS
    return None


def _late_ns(line: DecodeLine, job: DecodeJob, begins_ns: int) -> int:
    """How much too late it is predicted to be, by rule 1, if it begins then."""
    decoded_ns = begins_ns + job.predicted_ns
    return job.late_ns(decoded_ns, decoded_ns + (round(line.behind_ns) if line.ahead else 0))


def _wait_ns(state: Decoding, line: DecodeLine, job: DecodeJob, now_ns: int) -> int:
    """Until its turn: those who go first have the threads, or its model is to answer them."""
    place = _place(job)
    before = [other.places[: bisect_left(other.places, place)] for other in state.lines.values() if other.is_open]
    work_ns = sum(one[-1].predicted_ns for places in before for one in places)
    if state.has_thread and state.takes(job, now_ns) and not work_ns:
        wait_ns = 0
    elif state.takes_beside(job):
        wait_ns = work_ns + _running_ns(state, now_ns, is_beside=True)
    else:
        wait_ns = (_running_ns(state, now_ns) + work_ns) // state.threads_for(job, now_ns)
    if not job.most_ahead:
        return wait_ns
    too_many = bisect_left(line.places, place) + line.ahead + 1 - job.most_ahead
    return max(wait_ns, round(line.behind_ns * max(0, too_many) / job.most_ahead))


def _backlog_ns(state: Decoding, now_ns: int) -> int:
    waiting_ns = sum(place[-1].predicted_ns for line in state.lines.values() for place in line.places)
    return (_running_ns(state, now_ns) + waiting_ns) // state.threads


def _running_ns(state: Decoding, now_ns: int, *, is_beside: bool = False) -> int:
    each = {id(one): one for one in state.running.values() if one.is_beside or not is_beside}
    return sum(one.left_ns(now_ns) for one in each.values())


def _behind(state: Decoding, lines: list[DecodeLine], now_ns: int) -> Iterator[DecodeJob]:
    """Who might pass one that does not fit."""
    places = sorted(place for line in lines for place in islice(line.places, _LOOK_BEHIND))
    jobs = (place[-1] for place in places)
    return (job for job in jobs if _given_up(state, job, now_ns, now_ns) is None and state.takes(job, now_ns))
