"""The campaign: periods in the order of the plan, clients and faults in each, and a reckoning at the end of each.

Sees to it that whatever goes wrong costs its own period and is written down; the next one begins with a sound server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import gevent

from tests.campaign import checks
from tests.campaign.asks import Script
from tests.campaign.checks import Readiness, Window
from tests.campaign.clients import HttpClient, Place
from tests.campaign.endings import BOUND_S
from tests.campaign.faults import AFTERMATH_S, FAULTS, LASTING, put_back
from tests.campaign.field import Calls, Field, ProcessState, Readers, free_port
from tests.campaign.plan import ClientPlan, Fault, Period
from tests.campaign.records import PeriodRun, Records, Sample
from tests.campaign.rough import KINDS

_WARM_UP_S, _SETTLE_S, _BOOKS_S = 1.5, 15.0, 4.0
_SAMPLE_EVERY_S, _LOOK_EVERY_S = 0.25, 0.2
_Tell = Callable[[str], None]


def wage(records: Records, folder: Path, tell: _Tell) -> None:
    """All of the plan. The server's logs and its stores come to lie in `folder`."""
    for edges in records.plan.edges:
        field = Field(folder, edges, free_port(), free_port())
        campaign = _Campaign(field, records, tell)
        try:
            with _sampling(field, records):
                for period in records.plan.periods:
                    if period.edges == edges:
                        campaign.fight(period)
                campaign.end()
        finally:
            field.kill()  # also when somebody stops the campaign


class _Campaign:
    """The periods of one number of edges."""

    def __init__(self, field: Field, records: Records, tell: _Tell) -> None:
        self._field, self._records, self._tell = field, records, tell
        self._place = Place(field.http_port, field.grpc_port, records.now_s)
        self._baseline: list[ProcessState] = []
        self._late: list[str] = []  # breaches that show when a server is stopped

    def fight(self, period: Period) -> None:
        records, breaches, windows = self._records, self._late, list[Window]()
        self._late = []
        began_s, seen, counted = records.now_s(), Calls(), Calls()
        try:
            self._prepare(period)
            began_s = records.now_s()
            alive = self._field.processes()
            told_before = self._field.readers()
            before, first_ending, first_look = self._field.books(), len(records.endings), len(records.looks)
            breaches += self._load(period, windows)
            for window in windows:
                breaches += [f"{window.kind}: {window.what}"] if window.what.startswith("FAILED") else []
            put_back(self._field)
            breaches += self._until(_SETTLE_S, self._rest)
            endings, looks = records.endings[first_ending:], records.looks[first_look:]
            seen = checks.count(endings)
            died = [] if period.scene.loses_calls else checks.check_alive(alive, self._field.processes())
            breaches += died
            if not died:
                breaches += self._until(_BOOKS_S, lambda: checks.check_books(period, seen, self._counted(before)))
                breaches += self._until(_BOOKS_S, lambda: checks.check_readers(period, self._told(told_before)))
            counted = self._counted(before)
            breaches += checks.check_endings(period, endings, windows)
            breaches += checks.check_ready(looks, windows, may=period.scene.may & {"rejected"})
            records.checked += ["rest", "answers", "readiness", *([] if period.scene.loses_calls else ["books"])]
        except AssertionError as error:
            breaches.append(str(error))
            self._field.kill()
        run = PeriodRun(period, began_s, records.now_s(), tuple(windows), seen, counted, tuple(breaches))
        records.runs.append(run)
        self._tell(_brief(run))

    def end(self) -> None:
        """Stop the last server; what that shows belongs to the last period."""
        self._stop()
        if self._late:
            run = self._records.runs[-1]
            breaches = (*run.breaches, *self._late)
            self._records.runs[-1] = PeriodRun(
                *(run.period, run.began_s, run.ended_s, run.windows, run.seen, run.counted, breaches)
            )
            for line in self._late:
                self._tell(f"    BROKEN {line}")

    # Parts of a period

    def _prepare(self, period: Period) -> None:
        """A warm server as the period wants it. Raises AssertionError."""
        field = self._field
        if field.server is not None and field.setting == period.setting:
            return
        self._stop()
        field.start(period.setting)
        ordinary = [one for one in period.clients if one.kind in KINDS and one.kind not in period.scene.extra]
        warming = Period(period.number, period.edges, "calm", period.setting, _WARM_UP_S, tuple(ordinary), ())
        scratch = Records(self._records.plan, "")
        with _clients(warming, self._place, scratch):
            time.sleep(_WARM_UP_S)
        field.wait(lambda: field.held() == (0, 0, 0), "nothing is held after the warm-up", _SETTLE_S)
        time.sleep(0.3)
        self._baseline = field.processes()

    def _load(self, period: Period, windows: list[Window]) -> list[str]:
        """Clients and faults for as long as the period lasts; who did not come home."""
        records = self._records
        until_s = records.now_s() + period.lasts_s
        began_s = records.now_s()
        with _clients(period, self._place, records) as left, _looking(self._field, self._place, period, records):
            for fault in period.faults:
                _sleep_until(records, began_s + fault.at_s)
                windows.append(self._do(fault))
            _sleep_until(records, until_s)
        return left

    def _do(self, fault: Fault) -> Window:
        does, promises = FAULTS[fault.kind]
        from_s = self._records.now_s()
        try:
            what = does(self._field, fault)
        except AssertionError as error:
            what = f"FAILED: {error}"
        aftermath_s = 0.0 if promises else AFTERMATH_S
        over_s = from_s + (fault.lasts_s if fault.kind in LASTING else 0.0)
        return Window(fault.kind, from_s, self._records.now_s() + aftermath_s, what, not promises, over_s)

    def _rest(self) -> list[str]:
        field = self._field
        return checks.check_rest(field.held(), self._baseline, field.processes(), field.leftovers())

    def _counted(self, before: Calls) -> Calls:
        now = self._field.books()
        return Calls({cell: now[cell] - before[cell] for cell in now if now[cell] != before[cell]})

    def _told(self, before: Readers) -> Readers:
        now = self._field.readers()
        return Readers({cell: now[cell] - before[cell] for cell in now})

    def _until(self, timeout_s: float, look: Callable[[], list[str]]) -> list[str]:
        """The breaches that are left after some time; none as soon as there are none."""
        until_s = time.monotonic() + timeout_s
        while (breaches := look()) and time.monotonic() < until_s:
            time.sleep(0.1)
        return breaches

    def _stop(self) -> None:
        """End the server, if there is one, and look at what it leaves."""
        field = self._field
        if field.server is None:
            return
        try:
            self._late += checks.check_memory(self._baseline, field.processes())
            log = field.running().log
            code = field.stop()
            self._late += [f"after SIGTERM the server ended with {code}"] if code else []
            self._late += self._until(5.0, lambda: checks.check_rest((0, 0, 0), [], [], field.leftovers()))
            for path in field.logs:
                with suppress(OSError):  # that of a small disk has gone with it
                    log += path.read_text(errors="replace")
            field.logs.clear()
            self._late += checks.check_log(log)
            self._records.checked += ["memory", "end", "log"]
        except AssertionError as error:
            self._late.append(str(error))
            field.kill()


def _brief(run: PeriodRun) -> str:
    period, outcomes = run.period, dict[str, int]()
    for (_, _, outcome), many in run.seen.items():
        outcomes[outcome] = outcomes.get(outcome, 0) + many
    ended = ", ".join(f"{many} {outcome}" for outcome, many in sorted(outcomes.items(), key=lambda one: -one[1]))
    lines = [f"{run.began_s:6.1f} s  period {period.number}, {period.edges} edges, {period.kind}: {ended}"]
    lines += [f"    {window.from_s:6.1f} s  {window.what}" for window in run.windows]
    lines += [f"    BROKEN {line}" for line in run.breaches]
    return "\n".join(lines)


def _sleep_until(records: Records, at_s: float) -> None:
    time.sleep(max(0.0, at_s - records.now_s()))


@contextmanager
def _clients(period: Period, place: Place, records: Records) -> Iterator[list[str]]:
    """The period's clients at work; what is yielded names, afterwards, those that did not come back."""
    enough, left = threading.Event(), list[str]()

    def run(own: ClientPlan) -> None:
        client = KINDS[own.kind](place, Script(own.seed))
        number = 0
        try:
            while not enough.is_set():
                records.add(client.call(number))
                number += 1
                enough.wait(own.pause_ms / 1e3)
        except Exception as error:  # a mistake of the campaign's own, or a library's
            left.append(f"client {own.kind} fell over its call {number}: {error!r}")
        finally:
            client.close()
            # tritonclient's own event loop of this thread has descriptors that nobody else closes.
            gevent.get_hub().destroy(destroy_loop=True)

    threads = [
        threading.Thread(target=run, args=(one,), name=one.kind, daemon=True)
        for one in period.clients
        if one.kind in KINDS  # curl may not be there
    ]
    for thread in threads:
        thread.start()
    try:
        yield left
    finally:
        enough.set()
        until_s = time.monotonic() + BOUND_S + 5
        for thread in threads:
            thread.join(max(0.1, until_s - time.monotonic()))
        left += [
            f"client {thread.name} still waits {BOUND_S:g} s after the end of the period"
            for thread in threads
            if thread.is_alive()
        ]


@contextmanager
def _looking(field: Field, place: Place, period: Period, records: Records) -> Iterator[None]:
    """Ask again and again whether the server is ready, and hold it to its word."""
    enough = threading.Event()
    client = HttpClient(place, Script(period.number))

    def run() -> None:
        number = 0
        while not enough.wait(_LOOK_EVERY_S):
            began_s = records.now_s()
            answer = field.get("/v2/health/ready")
            if answer is None or answer.status_code != 200:
                words, ready = ("", None) if answer is None else (answer.text[:300], False)
                records.looks.append(Readiness(began_s, records.now_s(), ready, None, words))
                continue
            number += 5  # each of these is a connection of its own
            (ending,) = client.call(number)
            records.add([ending])
            is_right = ending.outcome == ("invalid" if ending.asked_wrong else "success")
            outcome = "success" if is_right else ending.outcome
            records.looks.append(Readiness(began_s, records.now_s(), True, outcome, ending.words))

    thread = threading.Thread(target=run, name="looking", daemon=True)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join(BOUND_S + 5)
        client.close()


@contextmanager
def _sampling(field: Field, records: Records) -> Iterator[None]:
    enough = threading.Event()

    def run() -> None:
        while not enough.wait(_SAMPLE_EVERY_S):
            at_s, states = records.now_s(), field.processes()
            records.samples.append(_sample(at_s, states, field.held()))

    thread = threading.Thread(target=run, name="sampling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join(10.0)


def _sample(at_s: float, states: Sequence[ProcessState], held: tuple[int, int, int] | None) -> Sample:
    return Sample(
        at_s=at_s,
        own_bytes=sum(one.own_bytes for one in states),
        processes=len(states),
        descriptors=sum(one.descriptors for one in states),
        threads=sum(one.threads for one in states),
        held=held,
    )
