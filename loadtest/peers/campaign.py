"""The whole comparison: environments, the sweep for each peer's best settings, then the duels.

Knows the order of things and what to do about a peer that fails: it is noted with its reason, and the others go on.
Everything measured so far is in `results()` at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby

from convoy.loadtest.peers.contender import Contender
from convoy.loadtest.peers.exam import PICTURES
from convoy.loadtest.peers.network import network_of
from convoy.loadtest.peers.plan import LOADS, Duel, Tryout, best_setting, duels, tryouts
from convoy.loadtest.peers.results import ClosedLoad, Conditions, Failure, Pair, Reading, Results, Setting, SweepTrial
from convoy.loadtest.peers.stand import Stand, Unfit

# Convoy has no setting to choose; this one stands where a record wants one.
UNTOUCHED = Setting(0, None)
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

    @property
    def starts(self) -> list[Tryout]:
        """With every setting for every network. Where no pictures are sent, nobody is needed to decode them."""
        by_network = groupby(sorted(self.loads, key=_kind), key=_kind)
        groups = [(has_pictures, tuple(loads)) for (_, has_pictures), loads in by_network]
        return [
            Tryout(self.name, setting, loads)
            for has_pictures, loads in groups
            for setting in self.settings
            if has_pictures or not setting.decoders
        ]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much measuring. The sweep tries each setting `sweep_rounds` times for `sweep_s` a load.

    Then come `rounds` pairs of `duration_s`; after `rounds_per_start` of them both servers are started anew.
    """

    sweep_s: float
    sweep_rounds: int
    duration_s: float
    rounds: int
    rounds_per_start: int
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
        """Every setting of every peer under every load that it takes. Who has but one has nothing to be looked for."""
        starts = [start for one in self._entrants.values() if len(one.settings) > 1 for start in one.starts]
        for tryout in tryouts(starts, self._effort.sweep_rounds, self._effort.seed):
            if not self._is_hopeless(tryout.peer):
                self._try(tryout)

    def fight(self) -> None:
        """Each peer at its best setting for the load, against Convoy, in pairs."""
        best = {
            (entrant.name, load): setting
            for entrant in self._entrants.values()
            for load in entrant.loads
            if (setting := self._best(entrant, load)) is not None
        }
        effort = self._effort
        for duel in duels(list(best), effort.rounds, effort.rounds_per_start, effort.seed):
            self._pair_up(duel, best[duel.peer, duel.load])

    def _best(self, entrant: Entrant, load: ClosedLoad) -> Setting | None:
        return entrant.settings[0] if len(entrant.settings) == 1 else best_setting(self._trials, entrant.name, load)

    def _try(self, tryout: Tryout) -> None:
        contender = self._entrants[tryout.peer].contender
        try:
            with self._stand.up(contender, tryout.setting, tryout.loads[0].body) as bench:
                for load in tryout.loads:
                    bench.prepare(load)
                    reading = bench.measure(load, self._effort.sweep_s)
                    bench.examine(load)
                    self._trials.append(SweepTrial(tryout.peer, load, tryout.setting, reading))
                    self._tell(f"{contender.title}, {tryout.setting.title}, {load.name}: {_brief(reading)}")
        except Unfit as unfit:
            self._note(tryout.peer, tryout.setting, unfit)

    def _pair_up(self, duel: Duel, setting: Setting) -> None:
        """The pairs of one start. Both servers are up all the time, each idle while the other one is measured."""
        theirs = self._entrants[duel.peer].contender
        sides = ((self._convoy, UNTOUCHED), (theirs, setting))
        side, before = sides[0], len(self._pairs)
        try:
            with ExitStack() as stack:
                benches = []
                for side in sides:
                    benches.append(stack.enter_context(self._stand.up(*side, duel.load.body)))
                    benches[-1].prepare(duel.load)
                for turn, ours_first in enumerate(duel.ours_first, start=duel.round):
                    readings: dict[int, Reading] = {}
                    for which in (0, 1) if ours_first else (1, 0):
                        side = sides[which]
                        readings[which] = benches[which].measure(duel.load, self._effort.duration_s)
                    self._pairs.append(Pair(turn, duel.peer, duel.load, setting, readings[1], readings[0]))
                    where = f"round {turn + 1}, {duel.load.name}"
                    self._tell(f"{where}: Convoy {_brief(readings[0])}; {theirs.title} {_brief(readings[1])}")
                for side, bench in zip(sides, benches, strict=True):  # noqa: B007  # read where it fails
                    bench.examine(duel.load)
        except Unfit as unfit:
            # Of a server that answers wrongly at the end, nothing counts.
            del self._pairs[before:]
            self._note(side[0].name, side[1], unfit)

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


def _kind(load: ClosedLoad) -> tuple[str, bool]:
    return network_of(load.body), load.body in PICTURES
