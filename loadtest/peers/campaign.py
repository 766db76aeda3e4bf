"""The whole comparison: environments, the sweep for each peer's best settings, then the duels.

Knows the order of things and what to do about a peer that fails: it is noted with its reason, and the others go on.
Everything measured so far is in `results()` at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from convoy.loadtest.peers.contender import CONVOY, Contender
from convoy.loadtest.peers.plan import LOADS, Duel, Tryout, best_setting, duels, tryouts
from convoy.loadtest.peers.results import ClosedLoad, Conditions, Failure, Pair, Reading, Results, Setting, SweepTrial
from convoy.loadtest.peers.stand import Stand, Unfit

# Convoy has no setting to choose; this one stands where a record wants one.
UNTOUCHED = Setting(1, None)
# A peer that could not be started so often, with whatever settings, will not be started again.
HOPELESS_STARTS = 2


@dataclass(frozen=True, slots=True)
class Entrant:
    """A peer that could be installed, the settings that are worth trying, and the loads that were asked for."""

    contender: Contender
    settings: tuple[Setting, ...]
    asked: tuple[ClosedLoad, ...] = LOADS

    @property
    def name(self) -> str:
        return self.contender.name

    @property
    def loads(self) -> tuple[ClosedLoad, ...]:
        """Those of them for which it has a body."""
        return tuple(load for load in self.asked if load.body in self.contender.routes)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much measuring. The sweep tries each setting `sweep_rounds` times for `sweep_s` a load."""

    sweep_s: float
    sweep_rounds: int
    duration_s: float
    rounds: int
    seed: int


class Campaign:
    """Call `sweep`, then `fight`. `tell` is given a line now and then."""

    def __init__(
        self,
        stand: Stand,
        convoy: Contender,
        entrants: Sequence[Entrant],
        effort: Effort,
        tell: Callable[[str], None],
    ) -> None:
        self._stand = stand
        self._convoy = convoy
        self._entrants: Mapping[str, Entrant] = {entrant.name: entrant for entrant in entrants}
        self._effort = effort
        self._tell = tell
        self._trials: list[SweepTrial] = []
        self._pairs: list[Pair] = []
        self._failures: list[Failure] = []

    def results(self, conditions: Conditions, absent: Sequence[Failure], *, interrupted: bool) -> Results:
        """What has been measured so far; `absent` are those who never came this far."""
        failures = dict.fromkeys([*absent, *self._failures])
        return Results(conditions, tuple(self._trials), tuple(self._pairs), tuple(failures), interrupted)

    def sweep(self) -> None:
        """Every setting of every peer under every load that it takes."""
        settings = [(entrant.name, setting) for entrant in self._entrants.values() for setting in entrant.settings]
        loads = {entrant.name: entrant.loads for entrant in self._entrants.values()}
        for tryout in tryouts(settings, loads, self._effort.sweep_rounds, self._effort.seed):
            if not self._is_hopeless(tryout.peer):
                self._try(tryout)

    def fight(self) -> None:
        """Each peer at its best setting for the load, against Convoy, in pairs."""
        best = {
            (entrant.name, load): setting
            for entrant in self._entrants.values()
            for load in entrant.loads
            if (setting := best_setting(self._trials, entrant.name, load)) is not None
        }
        for duel in duels(list(best), self._effort.rounds, self._effort.seed):
            self._pair_up(duel, best[duel.peer, duel.load])

    def _try(self, tryout: Tryout) -> None:
        contender = self._entrants[tryout.peer].contender
        try:
            # Closed here and now, so that the server is stopped whatever ends the loop.
            with closing(
                self._stand.measure(contender, tryout.setting, tryout.loads, self._effort.sweep_s)
            ) as readings:
                for load, reading in readings:
                    self._trials.append(SweepTrial(tryout.peer, load, tryout.setting, reading))
                    self._tell(f"{contender.title}, {tryout.setting.title}, {load.name}: {_brief(reading)}")
        except Unfit as unfit:
            self._note(tryout.peer, tryout.setting, unfit)

    def _pair_up(self, duel: Duel, setting: Setting) -> None:
        theirs = self._entrants[duel.peer].contender
        sides = [(self._convoy, UNTOUCHED), (theirs, setting)]
        readings: dict[str, Reading] = {}
        for contender, chosen in sides if duel.ours_first else sides[::-1]:
            try:
                ((_, readings[contender.name]),) = self._stand.measure(
                    contender, chosen, [duel.load], self._effort.duration_s
                )
            except Unfit as unfit:
                self._note(contender.name, chosen, unfit)
                return
        pair = Pair(duel.round, duel.peer, duel.load, setting, readings[duel.peer], readings[CONVOY])
        self._pairs.append(pair)
        turn = f"round {duel.round + 1}, {duel.load.name}"
        self._tell(f"{turn}: Convoy {_brief(pair.ours)}; {theirs.title} {_brief(pair.theirs)}")

    def _is_hopeless(self, peer: str) -> bool:
        starts = sum(failure.peer == peer and failure.stage == "start" for failure in self._failures)
        return starts >= HOPELESS_STARTS and not any(trial.peer == peer for trial in self._trials)

    def _note(self, peer: str, setting: Setting, unfit: Unfit) -> None:
        where = "" if setting is UNTOUCHED else f"with {setting.title}: "
        self._failures.append(Failure(peer, unfit.stage, f"{where}{unfit}"))
        self._tell(f"{peer} failed: {where}{unfit}")


def _brief(reading: Reading) -> str:
    failed = f", {reading.failed} failed" if reading.failed else ""
    return f"{reading.rps:,.0f} requests/s, p50 {reading.p50_ms:.2f} ms, {reading.server_cpu_us:.0f} us CPU{failed}"
