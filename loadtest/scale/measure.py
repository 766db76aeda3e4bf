"""Rounds of pairs: each form right before or after `convoy serve`, which is up beside it and idle meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from convoy.loadtest.bodies import Payload, binary_payloads, infer_path
from convoy.loadtest.peers.generator import Generator, Salvo, write_requests
from convoy.loadtest.scale.forms import PLAIN, STARTS, ScaleForm, ScaleStart, Standing, standing
from convoy.loadtest.scale.processes import cpu_s
from convoy.loadtest.server_client import inputs_of
from convoy.models.errors import JobError

CONNECTIONS = (16, 64)
_WARM_UP_S = 1.0
_SEED = 0


@dataclass(frozen=True, slots=True)
class ScaleTrial:
    """One form under load for some seconds. `cpu_us` is the CPU time of all its processes by answer."""

    form: str
    connections: int
    rps: float
    cpu_us: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class ScalePair:
    """A form and `convoy serve`, one right after the other."""

    plain: ScaleTrial
    other: ScaleTrial


@dataclass(slots=True)
class ScaleStand:
    """What is needed to measure anything."""

    store: Path
    model: str
    generator: Generator
    folder: Path
    seconds: float

    def round(self, number: int, tell: Callable[[str], None]) -> list[ScalePair]:
        """A pair of each form at each number of connections. Raises JobError."""
        chance = random.Random(_SEED + number)
        pairs = []
        for start in STARTS[1:]:
            tell(f"round {number + 1}: {', '.join(form.title for form in start.forms)}")
            pairs += self._pairs(start, chance)
        return pairs

    def _pairs(self, start: ScaleStart, chance: random.Random) -> list[ScalePair]:
        pairs = []
        with (
            standing(STARTS[0], self.store) as plain,
            standing(start, self.store) as other,
        ):
            self._salvo(PLAIN, plain, CONNECTIONS[0], _WARM_UP_S)
            for form in start.forms:
                self._salvo(form, other, CONNECTIONS[0], _WARM_UP_S)
                for connections in CONNECTIONS:
                    turns = [(PLAIN, plain), (form, other)]
                    chance.shuffle(turns)
                    told = {one.name: self._salvo(one, at, connections, self.seconds) for one, at in turns}
                    pairs.append(ScalePair(told[PLAIN.name], told[form.name]))
        return pairs

    def _salvo(self, form: ScaleForm, at: Standing, connections: int, seconds: float) -> ScaleTrial:
        inputs = inputs_of(httpx.get(f"{at.url}/v2/models/{self.model}", trust_env=False).json())
        payloads = [Payload(one.body, (*one.headers, *form.headers)) for one in binary_payloads(inputs, _SEED)]
        requests = write_requests(self.folder, at.url, infer_path(self.model), payloads)
        before_s = cpu_s(at.mark)
        totals = self.generator.run(Salvo(at.url, requests, connections, seconds))
        used_s = cpu_s(at.mark) - before_s
        if totals.failed:
            raise JobError(f"{form.title}: {totals.failed} requests failed, {totals.problem}")
        rps = totals.answered / totals.seconds
        cpu_us = 1e6 * used_s / totals.answered
        return ScaleTrial(form.name, connections, rps, cpu_us, totals.p50_ms, totals.p99_ms)
