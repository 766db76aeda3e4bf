"""`python -m tests.campaign --minutes 5 [--seed N] [--out DIR]`: what `make campaign` runs.

Periods in the order of the plan, clients and faults in each, and checks at the end of each. Whatever goes wrong costs
its own period; the next one begins with a sound server.

exit 0    every invariant held
     1    one did not; a line for each, and the command that draws the same plan again
     2    called wrongly
"""

from __future__ import annotations

import argparse
import logging
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.campaign import checks
from tests.campaign.asks import Script
from tests.campaign.checks import Readiness, Window
from tests.campaign.clients import BOUND_S, KINDS, Ending, Place
from tests.campaign.plan import ClientPlan, Fault, Period, draw_plan
from tests.campaign.server import CampaignServer, ProcessState

_WARM_UP_S, _SETTLE_S, _BOOKS_S = 1.5, 15.0, 4.0
# What has piled up is worked off after a fault is gone.
_AFTERMATH_S = 2.0
_LOOK_EVERY_S = 0.2
_MOST_LINES = 40


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="campaign", description="A real server under clients and faults from a seed.")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long")
    parser.add_argument("--seed", type=int, default=None, help="draws the plan; without it a new one is taken")
    parser.add_argument("--out", type=Path, default=Path("build/campaign"), help="where logs of a breach are written")
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error("--minutes must be above 0")
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    replay = f"python -m tests.campaign --minutes {options.minutes:g} --seed {seed}"
    print(f"seed {seed}; the same plan again: {replay}", flush=True)
    breaches = run(seed, options.minutes, options.out.absolute())
    for line in breaches[:_MOST_LINES]:
        print(f"BROKEN {line}", file=sys.stderr)
    if breaches:
        print(f"{len(breaches)} breaches, logs in {options.out}; replay: {replay}", file=sys.stderr)
        return 1
    print("every invariant held")
    return 0


def run(seed: int, minutes: float, out: Path) -> list[str]:
    """The plan of this seed; one line for each breach. Logs come to lie in `out` where there is one."""
    # Their libraries report each connection that breaks off, and here that is expected.
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="convoy-campaign-", dir=out) as folder:
        campaign = Campaign(CampaignServer(Path(folder)))
        try:
            for period in draw_plan(seed, minutes):
                campaign.run(period)
            campaign.stop_server()
        finally:
            campaign.server.kill()  # also when somebody stops the campaign
        if campaign.breaches:
            for log in Path(folder).glob("log-*.txt"):
                log.replace(out / log.name)
    return campaign.breaches


class Campaign:
    """A server, what its clients saw, and what did not hold."""

    def __init__(self, server: CampaignServer) -> None:
        self.server, self.breaches = server, list[str]()
        self._began_s, self._lock = time.monotonic(), threading.Lock()
        self._endings, self._looks = list[Ending](), list[Readiness]()
        self._place = Place(server.http_port, server.grpc_port, self.now_s)
        self._baseline: ProcessState | None = None

    def now_s(self) -> float:
        return time.monotonic() - self._began_s

    def run(self, period: Period) -> None:
        """One period; its breaches are added and told."""
        found, began_s = list[str](), self.now_s()
        try:
            self._prepare(period)
            self._endings, self._looks = [], []
            found += self._run_prepared(period)
        except AssertionError as error:
            found.append(str(error))
            self.server.kill()
        ended = ", ".join(f"{many} {how}" for how, many in Counter(one.outcome for one in self._endings).most_common())
        print(f"{began_s:6.1f} s  period {period.number}, {period.kind}: {ended}", flush=True)
        self._report(f"period {period.number} ({period.kind})", found)

    def stop_server(self) -> None:
        """End the server, if there is one, and look at what it leaves."""
        server, found = self.server, list[str]()
        if server.process is None:
            return
        try:
            found += checks.check_memory(self._baseline, server.state())
            code = server.stop()
            found += [f"after SIGTERM the server ended with {code}"] if code else []
        except AssertionError as error:
            found.append(str(error))
            server.kill()
        found += checks.check_log(server.log_path.read_text(errors="replace"))
        self._report("at the end of a server", found)

    def _report(self, where: str, found: list[str]) -> None:
        for line in found:
            print(f"    BROKEN {line}", flush=True)
        self.breaches += [f"{where}: {line}" for line in found]

    def _prepare(self, period: Period) -> None:
        """A warm server as the period wants it. Raises AssertionError."""
        if self.server.process is not None and self.server.setting == period.setting:
            return
        self.stop_server()
        self.server.start(period.setting)
        usual = tuple(one for one in period.clients if one.kind not in period.scene.extra)
        with self._clients(usual):
            time.sleep(_WARM_UP_S)
        self.server.wait(lambda: self.server.held() == (0, 0, 0), "nothing is held after the warm-up", _SETTLE_S)
        time.sleep(0.3)
        self._baseline = self.server.state()

    def _run_prepared(self, period: Period) -> list[str]:
        server, windows, began_s = self.server, list[Window](), self.now_s()
        before, books, readers = server.state(), server.books(), server.readers()
        with self._clients(period.clients) as left, self._looking(period):
            for fault in period.faults:
                self._sleep_until(began_s + fault.at_s)
                windows.append(self._do(fault))
                print(f"    {windows[-1].from_s:6.1f} s  {windows[-1].what}", flush=True)
            self._sleep_until(began_s + period.lasts_s)
        server.put_back()
        found = left + _until(_SETTLE_S, lambda: checks.check_rest(server.held(), self._baseline, server.state()))
        if not period.scene.loses_calls:
            now = server.state()
            found += [] if now and before and now.pid == before.pid else ["the server died, and nobody had killed it"]
            seen = checks.count(self._endings)
            found += _until(_BOOKS_S, lambda: checks.check_books(period, seen, server.books() - books))
            found += _until(_BOOKS_S, lambda: checks.check_readers(period, server.readers() - readers))
        found += checks.check_endings(period, self._endings, windows)
        return found + checks.check_ready(self._looks, windows, may=period.scene.may & {"rejected"})

    def _do(self, fault: Fault) -> Window:
        from_s, excuses = self.now_s(), fault.kind not in ("store", "load")
        what = self.server.do(fault)
        return Window(what, from_s, self.now_s() + (_AFTERMATH_S if excuses else 0.0), excuses)

    def _sleep_until(self, at_s: float) -> None:
        time.sleep(max(0.0, at_s - self.now_s()))

    @contextmanager
    def _clients(self, plans: tuple[ClientPlan, ...]) -> Iterator[list[str]]:
        """These clients at work; what is yielded names, afterwards, those that did not come back."""
        enough, left = threading.Event(), list[str]()

        def work(plan: ClientPlan) -> None:
            client = KINDS[plan.kind](self._place, Script(plan.seed))
            number = 0
            try:
                while not enough.is_set():
                    endings = client.call(plan.kind, number)
                    with self._lock:
                        self._endings += endings
                    number += 1
                    enough.wait(plan.pause_ms / 1e3)
            except Exception as error:  # a mistake of the campaign's own, or a library's
                left.append(f"client {plan.kind} failed in its call {number}: {error!r}")
            finally:
                client.close()

        threads = [threading.Thread(target=work, args=(one,), name=one.kind, daemon=True) for one in plans]
        try:
            with _at_work(threads, enough):
                yield left
        finally:
            left += [f"client {thread.name} still waits" for thread in threads if thread.is_alive()]

    @contextmanager
    def _looking(self, period: Period) -> Iterator[None]:
        """Ask again and again whether the server is ready, and hold it to its word."""
        enough = threading.Event()

        def look() -> None:
            number, client = 0, KINDS["pictures"](self._place, Script(period.number))
            while not enough.wait(_LOOK_EVERY_S):
                began_s, answer = self.now_s(), self.server.get("/v2/health/ready")
                if answer is None or answer.status_code != 200:
                    words, ready = ("", None) if answer is None else (answer.text[:300], False)
                    self._looks.append(Readiness(began_s, self.now_s(), ready, None, words))
                    continue
                number += 1
                (ending,) = client.call("looking", number)
                client.close()  # a connection of its own each time
                with self._lock:
                    self._endings.append(ending)
                is_right = ending.outcome == ("invalid" if ending.asked_wrong else "success")
                outcome = "success" if is_right else ending.outcome
                self._looks.append(Readiness(began_s, self.now_s(), True, outcome, ending.words))

        with _at_work([threading.Thread(target=look, name="looking", daemon=True)], enough):
            yield


@contextmanager
def _at_work(threads: Sequence[threading.Thread], enough: threading.Event) -> Iterator[None]:
    """These run until `enough` is set, and then have as long as a call may take."""
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        enough.set()
        until_s = time.monotonic() + BOUND_S + 5
        for thread in threads:
            thread.join(max(0.1, until_s - time.monotonic()))


def _until(timeout_s: float, look: Callable[[], list[str]]) -> list[str]:
    """The breaches that are left after some time; none as soon as there are none."""
    until_s = time.monotonic() + timeout_s
    while (breaches := look()) and time.monotonic() < until_s:
        time.sleep(0.1)
    return breaches


if __name__ == "__main__":
    # Leaving in good order, as Ctrl-C does, so that no server stays behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
