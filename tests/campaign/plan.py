"""What a campaign will do, drawn from its seed before anything starts: periods, clients and faults.

Pure: the same seed and minutes give the same plan, so that a replay does the same things in the same order. What a
client asks is drawn from its own seed and the number of the call (`asks`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

LEAST_PERIOD_S, USUAL_PERIOD_S = 5.0, 9.0
# What a start with its warm-up takes of the time, and what the checks after a period take.
_START_S, _CHECKS_S = 6.0, 1.0
# Of a period: before the first fault nothing is wrong, and after the last one there is time to recover.
_CALM_BEFORE, _CALM_AFTER = 0.15, 0.3
_USUAL_CLIENTS = (*("grpc", "stream", "tensors", "tensors", "pictures", "pictures", "form", "slow-reader"),)
_LOST = frozenset({"failed", "broken"})
_BUSY = frozenset({"rejected", "deadline_exceeded"})


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is done to the server `at_s` into its period and undone, where it can be, `lasts_s` later."""

    kind: str
    at_s: float
    lasts_s: float
    which: int = 0  # of the variants that the fault has; taken modulo their number


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """One client: its kind, the seed of what it asks, and its pause after each call."""

    kind: str
    seed: int
    pause_ms: float


@dataclass(frozen=True, slots=True)
class Scene:
    """One kind of period: `fewest` to `most` faults of one kind, and `extra` clients beside the usual ones.

    `loses_calls`: the process is killed or replaced, so that calls break off and its counters are lost. `may` are the
    outcomes, beyond success, that a good call may have. Versions of the models in `changing` come and go; of those in
    `away` there may be none at all, so that 404 and 503 are right, too.
    """

    fault: str = ""
    fewest: int = 1
    most: int = 1
    lasts_s: tuple[float, float] = (0.0, 0.0)
    setting: str = "poll"
    loses_calls: bool = False
    may: frozenset[str] = frozenset()
    changing: frozenset[str] = frozenset()
    away: frozenset[str] = frozenset()
    extra: Mapping[str, int] = field(default_factory=dict)


SCENES: dict[str, Scene] = {
    "calm": Scene(),
    "kill": Scene("kill", loses_calls=True, may=_LOST),
    "restart": Scene("restart", loses_calls=True, may=_LOST),
    # Also longer than a connection may be quiet: what has come meanwhile must be read before that is judged.
    "pause": Scene("pause", most=2, lasts_s=(0.3, 8.0), may=_BUSY),
    "store": Scene("store", fewest=3, most=6, changing=frozenset({"shift"})),
    "load": Scene(
        *("load", 4, 8),
        setting="explicit",
        changing=frozenset({"shift", "mean"}),
        away=frozenset({"shift", "mean"}),
    ),
    "leavers": Scene(extra={"leaver": 3, "picture-leaver": 2, "grpc-leaver": 2}),
    "overload": Scene(may=_BUSY, extra={"hurried": 6, "flood": 3, "large": 1}),
    "large pictures": Scene(may=_BUSY, extra={"large": 6}),
    "descriptors": Scene("hoard", lasts_s=(1.0, 3.0), setting="descriptors", may=_LOST | _BUSY | {"slow"}),
}


@dataclass(frozen=True, slots=True)
class Period:
    """A stretch of time in one scene."""

    number: int
    kind: str
    lasts_s: float
    clients: tuple[ClientPlan, ...]
    faults: tuple[Fault, ...]

    @property
    def scene(self) -> Scene:
        return SCENES[self.kind]

    @property
    def setting(self) -> str:
        """How the server is started for it."""
        return self.scene.setting


def draw_plan(seed: int, minutes: float) -> tuple[Period, ...]:
    """The plan of a seed, with each scene once if the time allows it."""
    chance = random.Random(seed)
    kinds = _draw_kinds(chance, max(2, round(minutes * 60 / USUAL_PERIOD_S)))
    starts = len({SCENES[kind].setting for kind in kinds})
    lasts_s = round(max(LEAST_PERIOD_S, (minutes * 60 - starts * _START_S) / len(kinds) - _CHECKS_S), 3)
    return tuple(_draw_period(chance, number, kind, lasts_s) for number, kind in enumerate(kinds))


def _draw_kinds(chance: random.Random, count: int) -> list[str]:
    """Each kind once before any comes again; those of one setting together, so that the server seldom restarts."""
    drawn: list[str] = []
    while len(drawn) < count:
        drawn += chance.sample(list(SCENES), len(SCENES))
    settings = list(dict.fromkeys(SCENES[kind].setting for kind in drawn[:count]))
    return sorted(drawn[:count], key=lambda kind: settings.index(SCENES[kind].setting))


def _draw_period(chance: random.Random, number: int, kind: str, lasts_s: float) -> Period:
    scene = SCENES[kind]
    kinds = [*_USUAL_CLIENTS, *(one for one, count in scene.extra.items() for _ in range(count))]
    clients = tuple(ClientPlan(one, chance.randrange(1 << 32), _pause_ms(chance, one)) for one in kinds)
    return Period(number, kind, lasts_s, clients, _draw_faults(chance, scene, lasts_s))


def _pause_ms(chance: random.Random, kind: str) -> float:
    if kind in ("hurried", "flood"):
        return 0.0
    return round(chance.uniform(150, 400) if kind == "grpc-leaver" else chance.uniform(2, 30), 1)


def _draw_faults(chance: random.Random, scene: Scene, period_s: float) -> tuple[Fault, ...]:
    """Spread over the middle of the period, each over before the next begins."""
    if not scene.fault:
        return ()
    first, last = _CALM_BEFORE * period_s, (1 - _CALM_AFTER) * period_s
    times = sorted(chance.uniform(first, last) for _ in range(chance.randint(scene.fewest, scene.most)))
    faults = []
    for at_s, end_s in zip(times, [*times[1:], last + _CALM_AFTER * period_s / 2], strict=True):
        lasts_s = min(chance.uniform(*scene.lasts_s), max(0.0, end_s - at_s - 0.2))
        faults.append(Fault(scene.fault, round(at_s, 3), round(lasts_s, 3), chance.randrange(1 << 16)))
    return tuple(faults)
