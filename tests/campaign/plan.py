"""What a campaign will do, drawn from its seed before anything is started: periods, clients, faults.

Pure: the same seed, minutes and edges give the same plan, so that a replay does the same things in the same order.
Knows nothing of processes. What a client asks is drawn from its own seed and the number of the call (`asks`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

LEAST_PERIOD_S, USUAL_PERIOD_S = 5.0, 9.0
# Of the time of each, what a server takes to start and warm up, and a period to be reckoned up.
_START_S, _RECKONING_S = 6.0, 1.0
# Of a period: before the first fault nothing is wrong, and after the last one there is time to be well again.
_CALM_BEFORE, _CALM_AFTER = 0.15, 0.3
_KINDS = (
    *("tritonclient", "tritonclient-grpc", "tritonclient-stream", "httpx", "http.client", "convoy", "raw", "shared"),
    *("album", "form", "grpc-pictures", "curl"),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is done to the server `at_s` into its period, and undone (where it can be) `lasts_s` later."""

    kind: str
    at_s: float
    lasts_s: float
    which: int = 0  # of those that could be hit: a process, a step; taken modulo their number


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """One client: its kind, the seed of what it asks, and its pause after each call."""

    kind: str
    seed: int
    pause_ms: float


@dataclass(frozen=True, slots=True)
class Period:
    """A stretch of time under one kind of trouble. `setting` says how the server is started for it."""

    number: int
    edges: int
    kind: str
    setting: str
    lasts_s: float
    clients: tuple[ClientPlan, ...]
    faults: tuple[Fault, ...]

    @property
    def scene(self) -> Scene:
        return SCENES[self.kind]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that will be done."""

    seed: int
    minutes: float
    edges: tuple[int, ...]
    periods: tuple[Period, ...]

    def document(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)


_Draw = Callable[[random.Random, float, int], tuple[Fault, ...]]


@dataclass(frozen=True, slots=True)
class Scene:
    """One kind of period.

    `loses_calls`: a process is killed or replaced, so that calls break off and books are lost. `may` are endings,
    beyond the right one, that a good call may have in it. `changing` are models whose versions come and go; `away`
    those of which there may be none at all, so that 404 and 503 are right, too.
    """

    about: str
    draw: _Draw
    setting: str = "poll"
    loses_calls: bool = False
    may: frozenset[str] = frozenset()
    changing: frozenset[str] = frozenset()
    away: frozenset[str] = frozenset()
    extra: Mapping[str, int] = field(default_factory=dict)  # clients besides the mixture
    needs_edges: bool = False


def _none(chance: random.Random, lasts_s: float, edges: int) -> tuple[Fault, ...]:
    return ()


def _some(kind: str, most: int, lasts_s: tuple[float, float] = (0.0, 0.0), least: int = 1) -> _Draw:
    """From `least` to `most` faults of a kind, spread over the middle of the period."""

    def draw(chance: random.Random, period_s: float, edges: int) -> tuple[Fault, ...]:
        first, last = _CALM_BEFORE * period_s, (1 - _CALM_AFTER) * period_s
        times = sorted(chance.uniform(first, last) for _ in range(chance.randint(least, most)))
        ends = [*times[1:], last + _CALM_AFTER * period_s / 2]
        return tuple(
            Fault(
                kind,
                round(at_s, 3),
                round(min(chance.uniform(*lasts_s), max(0.0, end_s - at_s - 0.2)), 3),
                chance.randrange(1 << 16),
            )
            for at_s, end_s in zip(times, ends, strict=True)
        )

    return draw


_LOST = frozenset({"failed", "broken"})
_BUSY = frozenset({"rejected", "deadline_exceeded"})

SCENES: dict[str, Scene] = {
    "calm": Scene("the mixture of clients, and nothing else", _none),
    "kill core": Scene(
        "SIGKILL to the core's process, or to the one that was started, which then is started again",
        _some("kill core", 1),
        loses_calls=True,
        may=_LOST,
    ),
    "kill edge": Scene(
        "SIGKILL to edge processes", _some("kill edge", 3), loses_calls=True, may=_LOST, needs_edges=True
    ),
    # Also longer than a connection may be quiet: what has come meanwhile must be read before that is judged.
    "pause": Scene("SIGSTOP to every process, or to one, and SIGCONT", _some("pause", 2, (0.3, 8.0)), may=_BUSY),
    "restart": Scene("SIGTERM, and the server is started again", _some("restart", 1), loses_calls=True, may=_LOST),
    "store": Scene(
        "versions added, removed, replaced and corrupted while the store is polled",
        _some("store", 6, least=3),
        changing=frozenset({"shift"}),
    ),
    "load": Scene(
        "models loaded, unloaded and loaded with another batch size over HTTP and gRPC",
        _some("load", 8, least=4),
        setting="explicit",
        changing=frozenset({"shift", "mean"}),
        away=frozenset({"shift", "mean"}),
    ),
    "leavers": Scene(
        "clients that leave in the middle of a request, of the wait, of an answer and of a stream",
        _none,
        extra={"leaver": 3, "picture-leaver": 2, "grpc-leaver": 2},
    ),
    "bombs": Scene(
        "bodies that grow when they are decompressed, images of a thousand megapixels, JSON without a bottom",
        _none,
        may=frozenset({"rejected"}),
        extra={"bomber": 2},
    ),
    "overload": Scene(
        "more than can be answered, with deadlines and priorities",
        _none,
        may=_BUSY,
        extra={"hurried": 6, "flood": 3, "heavy": 1},
    ),
    "large pictures": Scene(
        "large pictures beside all others, more at once than there is memory for",
        _none,
        may=_BUSY,
        extra={"heavy": 6},
    ),
    "spoiled": Scene(
        "requests that are almost right", _none, may=frozenset({"rejected", "invalid"}), extra={"spoiler": 3}
    ),
    "descriptors": Scene(
        "more connections than the server may have descriptors",
        _some("hoard", 1, (1.0, 3.0)),
        setting="descriptors",
        may=_LOST | _BUSY | {"slow"},
    ),
    "full disk": Scene(
        "the disk of the log, of temporary files and of the cache is full",
        _some("fill disk", 2, (0.5, 3.0)),
        setting="disk",
    ),
}


def draw_plan(seed: int, minutes: float, edges: tuple[int, ...]) -> Plan:
    """The plan of a seed. Every number of edges has an equal part of the time, and in it each scene once if it can."""
    share_s = minutes * 60 / len(edges)
    periods: list[Period] = []
    for number_of_edges in edges:
        chance = random.Random(f"{seed} {number_of_edges}")
        kinds = _draw_kinds(chance, max(2, round(share_s / USUAL_PERIOD_S)), number_of_edges)
        starts = len({SCENES[kind].setting for kind in kinds})
        load_s = (share_s - starts * _START_S) / len(kinds) - _RECKONING_S
        lasts_s = round(max(LEAST_PERIOD_S, load_s), 3)
        for kind in kinds:
            periods.append(_draw_period(chance, len(periods), number_of_edges, kind, lasts_s))
    return Plan(seed, minutes, edges, tuple(periods))


def _draw_kinds(chance: random.Random, count: int, edges: int) -> list[str]:
    """Each kind once before any comes again; those of one setting together, so that the server is seldom restarted."""
    kinds = [kind for kind, scene in SCENES.items() if edges or not scene.needs_edges]
    drawn: list[str] = []
    while len(drawn) < count:
        drawn += chance.sample(kinds, len(kinds))
    settings = list(dict.fromkeys(SCENES[kind].setting for kind in drawn[:count]))
    return sorted(drawn[:count], key=lambda kind: settings.index(SCENES[kind].setting))


def _draw_period(chance: random.Random, number: int, edges: int, kind: str, lasts_s: float) -> Period:
    scene = SCENES[kind]
    kinds = [*_KINDS, *(one for one, count in scene.extra.items() for _ in range(count))]
    clients = tuple(ClientPlan(one, chance.randrange(1 << 32), _pause_ms(chance, one)) for one in kinds)
    return Period(number, edges, kind, scene.setting, lasts_s, clients, scene.draw(chance, lasts_s, edges))


def _pause_ms(chance: random.Random, kind: str) -> float:
    if kind in ("hurried", "flood", "spoiler"):
        return 0.0
    return round(chance.uniform(150, 400) if kind in ("curl", "bomber", "grpc-leaver") else chance.uniform(2, 30), 1)
