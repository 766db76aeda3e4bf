"""Several servers that batch, one stream of requests, and rules that choose a server for each. Virtual time.

A server takes whatever waits into its next batch as soon as it is free. Rules see what whoever routes could see: how
many answers each server owes him, now or as it was told some time ago.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from convoy.app.scheduling.routing import BatchSpeed, ranked

# By what is outstanding at each server and a source of chance: the index of the one that the request goes to.
Route = Callable[[Sequence[int], random.Random], int]


@dataclass(slots=True)
class _Server:
    speed: BatchSpeed
    waiting: deque[float] = field(default_factory=deque)  # when they came
    running: list[float] = field(default_factory=list)

    @property
    def outstanding(self) -> int:
        return len(self.waiting) + len(self.running)


def share_late(
    speeds: Sequence[BatchSpeed],
    route: Route,
    *,
    load: float,
    deadline_s: float,
    requests: int,
    seed: int,
    report_every_s: float = 0.0,
) -> float:
    """The share of requests that are late, at `load` of what all servers can do. Arrivals are Poisson.

    With `report_every_s` the rule sees what was outstanding at the last report.
    """
    chance = random.Random(seed)
    servers = [_Server(speed) for speed in speeds]
    per_s = load * sum(speed.max_batch / speed.batch_s(speed.max_batch) for speed in speeds)
    ends: list[tuple[float, int]] = []
    late = 0
    now_s = told_s = 0.0
    told = [0] * len(servers)

    def start(index: int, at_s: float) -> None:
        server = servers[index]
        count = min(len(server.waiting), server.speed.max_batch)
        server.running = [server.waiting.popleft() for _ in range(count)]
        if count:
            heapq.heappush(ends, (at_s + server.speed.batch_s(count), index))

    def finish_until(until_s: float) -> None:
        nonlocal late
        while ends and ends[0][0] <= until_s:
            at_s, index = heapq.heappop(ends)
            late += sum(at_s - came_s > deadline_s for came_s in servers[index].running)
            start(index, at_s)

    for _ in range(requests):
        now_s += chance.expovariate(per_s)
        finish_until(now_s)
        if now_s >= told_s + report_every_s:
            told, told_s = [server.outstanding for server in servers], now_s
        chosen = route(told, chance)
        servers[chosen].waiting.append(now_s)
        if not servers[chosen].running:
            start(chosen, now_s)
    finish_until(float("inf"))
    return late / requests


def least_outstanding(outstanding: Sequence[int], chance: random.Random) -> int:
    least = min(outstanding)
    return chance.choice([index for index, count in enumerate(outstanding) if count == least])


def by_expected_finish(speeds: Sequence[BatchSpeed]) -> Route:
    return lambda outstanding, _: ranked(outstanding, speeds)[0]
