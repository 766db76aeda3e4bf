"""How an engine proves itself before it may serve: it runs, it is right, and its latency is known.

Its answers to a canary, a small inference with a known answer, are checked. Of the engines that are right, one serves
on a device: all are measured in turns, and all but the best are closed. The caller chooses which engines and files to
try.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from convoy.app.engines.base import Engine, EngineInfo, WarmShapes, run_arrays
from convoy.app.engines.batch import EngineFailure, FailureScope
from convoy.app.engines.jobs import NotProved, refusal
from convoy.app.engines.measure import (
    Pace,
    Rounds,
    batch_knots,
    is_beyond_doubt,
    paired_speedup,
    run_in_turns,
    summarise,
)
from convoy.app.engines.select import measured_here
from convoy.app.engines.table import row_named
from convoy.models.boxes import in_order_of
from convoy.models.bundle import Accuracy, Canary, LatencyPoint, Variant
from convoy.models.errors import JobError
from convoy.models.tensors import as_numbers, random_values

_log = logging.getLogger("convoy")

NOTHING_SERVES = "no variant serves"
# How long to measure one variant at the start if no latency table fits this device. For a slower network only small
# batches are measured, and the server learns the others in service.
MEASURING_BUDGET_S = 0.15
# The exact graph on another CPU has other kernels and another order of summation.
_FP32_TOLERANCE = 1e-3


class CanaryFailed(Exception):
    """The engine gave a wrong answer, or none, to an input with a known answer."""


@dataclass(frozen=True, slots=True)
class CanaryCheck:
    """Inputs, their expected outputs, and the largest relative error ||a - b|| / ||b|| allowed per sample.

    A class that leads by more than `sure_margin` times ||b|| must still lead; None means that classes are not checked.
    For outputs in `shares`, a ||b|| below 0.01 counts as that much.
    """

    canary: Canary
    tolerance: float
    batched: bool
    sure_margin: float | None = None
    shares: frozenset[str] = frozenset()

    @staticmethod
    def of_variant(canary: Canary, variant: Variant, *, batched: bool = True) -> CanaryCheck:
        """A bundle's own canary; each variant may be as far off as it was at export, plus a margin.

        If the model is not `batched`, the canary is one request, and its arrays have the whole shapes.
        """
        # A quantised variant rounds differently on another CPU, so it may be further off than at export.
        tolerance = max(_FP32_TOLERANCE, 2.0 * variant.max_relative_error)
        shares = frozenset(name for name, values in canary.outputs.items() if _are_shares(values))
        return CanaryCheck(canary, tolerance, batched, max(_FP32_TOLERANCE, variant.max_relative_error), shares)

    @staticmethod
    def of_first_answer(engine: Engine) -> CanaryCheck:
        """For a model without a canary: a seeded input, and this engine's own answer to it."""
        generator = np.random.default_rng(20)
        inputs = {spec.name: random_values(generator, spec, engine.whole_shape(spec, 1)) for spec in engine.inputs}
        outputs = run_arrays(engine, inputs)
        return CanaryCheck(Canary(inputs, outputs), _FP32_TOLERANCE, engine.batched)

    @staticmethod
    def of_another_device(engine: Engine) -> CanaryCheck:
        """The same, for an engine of the same model on another kind of device.

        Only floats: an index or a decision at a threshold may flip if two numbers nearly tie.
        """
        own = CanaryCheck.of_first_answer(engine)
        floats = {spec.name for spec in engine.outputs if np.issubdtype(spec.numpy_dtype, np.floating)}
        outputs = {name: array for name, array in own.canary.outputs.items() if name in floats}
        # Graphs in half precision round differently on every device as well.
        return replace(own, canary=Canary(own.canary.inputs, outputs), tolerance=1e-2)

    def run(self, engine: Engine, *, samples: int | None = None) -> None:
        """Ask the engine, optionally only the first `samples`. Raises CanaryFailed."""
        total = self.canary.samples if self.batched else 1
        wanted = min(total, samples or total)
        largest = engine.info.batch_sizes[-1]
        for start in range(0, wanted, largest):
            self._compare(engine, slice(start, min(wanted, start + largest)))

    def _compare(self, engine: Engine, rows: slice) -> None:
        inputs = {name: self._rows(array, rows) for name, array in self.canary.inputs.items()}
        try:
            outputs = run_arrays(engine, inputs)
        except EngineFailure as failure:
            raise CanaryFailed(f"the canary did not run: {failure}") from failure
        wanted = {name: self._rows(array, rows) for name, array in self.canary.outputs.items()}
        said = self.canary.detection
        if said is not None and said.is_list and self.batched:
            outputs = in_order_of(wanted, outputs, said)
        for name, rows_expected in wanted.items():
            # A probability of a millionth is as good as none, and half precision cannot represent it.
            least_size = 0.01 if name in self.shares else 0.0
            error = _worst_relative_error(outputs[name], rows_expected, least_size, per_row=self.batched)
            if error > self.tolerance:
                raise CanaryFailed(f"output {name!r} is off by {error:.3g}; the tolerance is {self.tolerance:.3g}")
            if self.sure_margin is not None and _leader_changed(
                outputs[name], rows_expected, self.sure_margin, least_size
            ):
                raise CanaryFailed(f"output {name!r} has a different top class although fp32 is confident")

    def _rows(self, array: np.ndarray, rows: slice) -> np.ndarray:
        return array[rows] if self.batched else array


ReasonCode = Literal["fastest_verified", "fastest_at_export", "only_available"]


@dataclass(frozen=True, slots=True)
class ProvedEngine:
    """An engine that passed its canary, and all that is known about it.

    `reason` says in a sentence why this engine and variant serve, `code` in a word. `platform` is the protocol's name
    for them. `file` and `accuracy` are the variant's; `accuracy` is None if export measured none.
    """

    engine: Engine
    canary: CanaryCheck
    latency: tuple[LatencyPoint, ...]
    reason: str
    platform: str
    file: str = ""
    accuracy: Accuracy | None = None
    code: ReasonCode = "only_available"

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    @property
    def shapes(self) -> WarmShapes | None:
        """What the engine keeps for dynamic sizes."""
        return self.engine.warm_shapes()


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that passed its canary, and the variant that it runs. `reason` and `code` say why it is tried."""

    variant: Variant
    engine: Engine
    canary: CanaryCheck
    reason: str
    code: ReasonCode = "only_available"


def prove(variant: Variant, canary: Canary, reason: str, engine: Engine, warm_up_runs: int = 1) -> Candidate:
    """Warm an engine up and run the canary. Raises EngineFailure or CanaryFailed."""
    check = CanaryCheck.of_variant(canary, variant, batched=engine.batched)
    for _ in range(warm_up_runs):
        engine.warm_up()
    check.run(engine)
    return Candidate(variant, engine, check, reason)


def prove_by_itself(
    variant: Variant, reference: CanaryCheck | None, reason: str, engine: Engine, warm_up_runs: int = 1
) -> Candidate:
    """Without a canary, the engine must repeat its first answer, which must agree with `reference`.

    Raises NotProved, and EngineFailure if memory is short.
    """
    try:
        for _ in range(warm_up_runs):
            engine.warm_up()
        if reference is not None:
            reference.run(engine)
        return Candidate(variant, engine, CanaryCheck.of_first_answer(engine), reason)
    except EngineFailure as failure:
        if failure.scope is FailureScope.MEMORY:
            raise
        raise NotProved(f"{variant.file}: does not run on zeros or random input ({failure})") from failure
    except CanaryFailed as failure:
        raise NotProved(f"{variant.file}: its output differs from the CPU's: {failure}") from failure


def open_and_prove(
    variant: Variant, open_engine: Callable[[], Engine], prove_engine: Callable[[Engine], Candidate]
) -> Candidate:
    """Raises NotProved, whatever went wrong; then nothing is left open."""
    try:
        engine = open_engine()
        try:
            return prove_engine(engine)
        except BaseException:
            engine.close()
            raise
    except NotProved:
        raise
    except (JobError, OSError, EngineFailure, CanaryFailed) as failure:
        raise NotProved(f"{variant.file}: {failure}") from failure
    except Exception as error:  # a bug, here or in a library, which must not cost more than this engine
        _log.exception("%s failed in an engine; this is a bug", variant.file)
        raise NotProved(f"{variant.file}: {type(error).__name__}: {error}") from error


def race(engines: Sequence[Engine]) -> list[Rounds]:
    """The engines' runs in turns, so that any two can be compared. Raises EngineFailure."""
    knots = batch_knots(engines[0].info.batch_sizes[-1])
    budget_s = MEASURING_BUDGET_S * len(engines) / len(knots)
    return list(run_in_turns(engines, Pace(budget_s, 1.0, warm_up=1, fewest=3, most=50)))


def fastest(measured: Sequence[Rounds]) -> int:
    """The engine that is significantly faster than all more exact ones; they come most exact first."""
    best = 0
    for own in range(1, len(measured[0].runs_ms)):
        # Compared with the best so far: what is significantly faster than a slow first one may beat that only by noise.
        of_best, of_own = ([rounds.runs_ms[index] for rounds in measured] for index in (best, own))
        if is_beyond_doubt(paired_speedup(of_best, of_own)):
            best = own
    return best


def choose(candidates: list[Candidate], refused: list[str]) -> ProvedEngine:
    """The best of them, the first if others are hardly faster; `refused` gets a line for each of the others.

    Raises NotProved if there is none, or the only one cannot be measured.
    """
    if not candidates:
        raise NotProved(NOTHING_SERVES)
    try:
        best, points = _winner(candidates)
    except EngineFailure as failure:
        if len(candidates) > 1:
            return choose(_sound(candidates, refused), refused)
        candidates[0].engine.close()
        raise NotProved(f"{candidates[0].variant.file}: {_fails(failure)}") from failure
    info = best.engine.info
    for one in candidates:
        if one is not best:
            one.engine.close()
            refused.append(_told(one, f"it is not faster than {info.engine} in {info.precision}"))
    best.engine.rest()
    platform = row_named(info.engine).platform
    variant = best.variant
    code: ReasonCode = "fastest_verified" if len(candidates) > 1 else best.code
    return ProvedEngine(best.engine, best.canary, points, best.reason, platform, variant.file, variant.accuracy, code)


def _winner(candidates: list[Candidate]) -> tuple[Candidate, tuple[LatencyPoint, ...]]:
    """The best and its latencies: export's if the only one was measured here, otherwise new. Raises EngineFailure."""
    if len(candidates) == 1:
        (only,) = candidates
        if table := measured_here(only.variant, only.engine.info.device_fingerprint):
            return only, table.points
    measured = race([candidate.engine for candidate in candidates])
    best = fastest(measured)
    return candidates[best], tuple(summarise(rounds.batch_size, rounds.runs_ms[best]) for rounds in measured)


def _sound(candidates: list[Candidate], refused: list[str]) -> list[Candidate]:
    """One that fails while it is measured does not take the others with it."""
    failures: dict[int, EngineFailure] = {}
    for one in candidates:
        try:
            race([one.engine])
        except EngineFailure as failure:
            failures[id(one)] = failure
    failures = failures or {id(candidates[-1]): EngineFailure("beside others")}
    for one in candidates:
        if id(one) in failures:
            one.engine.close()
            refused.append(_told(one, _fails(failures[id(one)])))
    return [one for one in candidates if id(one) not in failures]


def _fails(failure: EngineFailure) -> str:
    return f"it failed while it was measured: {failure}"


def _told(candidate: Candidate, why: str) -> str:
    info = candidate.engine.info
    return refusal(info.engine, info.device, f"{candidate.variant.file}: {why}")


def _are_shares(outputs: np.ndarray) -> bool:
    """Whether these are probabilities, judged by their values."""
    return np.issubdtype(outputs.dtype, np.floating) and bool(((outputs >= 0) & (outputs <= 1)).all())


def _worst_relative_error(got: np.ndarray, expected: np.ndarray, least_size: float, *, per_row: bool) -> float:
    """The largest ||got - expected|| / ||expected|| of any row; infinite if NaN or infinity are at different places."""
    if got.shape != expected.shape:
        return float("inf")
    if expected.dtype == object:  # strings are the same or they are not
        return 0.0 if np.array_equal(got, expected) else float("inf")
    got, expected = as_numbers(got), as_numbers(expected)
    rows = len(expected) if per_row else 1
    left, right = (array.astype(np.float64).reshape(rows, -1) for array in (got, expected))
    # A bare model may answer NaN to a seeded input by design; then it must repeat that.
    usual = np.isfinite(right)
    if not np.array_equal(left[~usual], right[~usual], equal_nan=True) or not np.isfinite(left[usual]).all():
        return float("inf")
    left, right = np.where(usual, left, 0.0), np.where(usual, right, 0.0)
    size = np.linalg.norm(right, axis=1)
    return float(np.max(np.linalg.norm(left - right, axis=1) / np.maximum(size, max(least_size, 1e-12)), initial=0.0))


def _leader_changed(got: np.ndarray, expected: np.ndarray, sure_margin: float, least_size: float) -> bool:
    """Whether another class leads in some row [classes], although the expected one leads by more than the margin."""
    if expected.ndim != 2 or expected.shape[1] < 2 or not np.issubdtype(expected.dtype, np.floating):
        return False
    second, first = np.partition(expected.astype(np.float64), -2, axis=1)[:, -2:].T
    size = np.maximum(np.linalg.norm(expected.astype(np.float64), axis=1), least_size)
    is_sure = first - second > sure_margin * size
    return bool(np.any(is_sure & (got.argmax(axis=1) != expected.argmax(axis=1))))
