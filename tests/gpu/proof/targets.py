"""What the figures must be: ratios within one run, so that no other machine's figures are needed.

Pure arithmetic over the records. A target that nothing was measured for is unproved, and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from convoy.models.bundle import Precision
from tests.gpu.proof.records import Agreement, BareRow, HttpRow, Proof, Target

RESNET, DIGITS = "resnet50", "digits"
TENSORRT, RTX, ONNXRUNTIME, TORCH = "tensorrt", "tensorrt-rtx", "onnxruntime-cuda", "torch on Convoy's slots"
ENGINES = (TENSORRT, RTX, ONNXRUNTIME, TORCH)
SERVING = (TENSORRT, RTX, ONNXRUNTIME)
LARGE_BATCH = 32


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure and how it came about; None: there is nothing to make it from."""

    value: float | None
    how: str


_NOTHING = Measured(None, "its rows were not measured")


@dataclass(frozen=True, slots=True)
class Aim:
    """One target, the same for every engine."""

    name: str
    measure: Callable[[Proof, str], Measured]
    at_least: float | None = None
    at_most: float | None = None


def judge(proof: Proof) -> tuple[Target, ...]:
    """Every aim for every engine."""
    return tuple(_judged(proof, aim, engine) for engine in ENGINES for aim in AIMS)


def _judged(proof: Proof, aim: Aim, engine: str) -> Target:
    found = aim.measure(proof, engine)
    if found is _NOTHING:
        found = Measured(None, _why_not(proof, engine))
    return Target(aim.name, engine, aim.at_least, aim.at_most, found.value, found.how)


def _why_not(proof: Proof, engine: str) -> str:
    reasons = (one.reason for one in proof.dropped if one.what == engine)
    return next(reasons, _NOTHING.how)


def core_share(proof: Proof, engine: str) -> Measured:
    """The core's best rate over the bare engine's best."""
    core = [row.images_per_s for row in proof.core if _is_of(row.setting.engine, row.setting.network, engine)]
    bare = _best_bare(proof, engine)
    if not core or bare is None:
        return _NOTHING
    return Measured(max(core) / bare, f"{max(core):.0f} of {bare:.0f} images/s")


def http_share(proof: Proof, engine: str) -> Measured:
    """Over HTTP with edge processes, against the bare engine's best in the precision that the server chose."""
    rows = [row for row in proof.http if _is_of(row.engine, row.network, engine)]
    shares = {row.edges: share for row in rows if (share := _http_share(proof, row)) is not None}
    if not shares:
        return _NOTHING
    told = ", ".join(f"{_edges(edges)}: {share:.2f}" for edges, share in shares.items())
    several = [share for edges, share in shares.items() if edges is not None and edges > 1]
    return Measured(max(several), told) if several else Measured(None, f"no run with several edge processes; {told}")


def _http_share(proof: Proof, row: HttpRow) -> float | None:
    bare = _best_bare(proof, row.engine, row.precision)
    return None if bare is None else row.images_per_s / bare


def _edges(edges: int | None) -> str:
    return {None: "no edge process", 1: "one edge"}.get(edges, f"{edges} edges")


def hidden_share(proof: Proof, engine: str) -> Measured:
    """Of the time that one slot spends on a batch beyond computing it, what a second slot takes away; the worst."""
    shares = {}
    for one in _resnet(proof, engine, "fp16"):
        two = _beside(proof, one, slots=2)
        if one.setting.slots == 1 and one.setting.graphs and two is not None:
            shares[one.setting.batch_size] = hidden(one, two)
    return _worst(shares)


def hidden(one: BareRow, two: BareRow) -> float:
    """(T1 - T2) / (T1 - C): wall time per batch with one slot and with two, and C, the time it computes."""
    return (one.period_ms - two.period_ms) / max(one.period_ms - one.compute_ms, 1e-6)


def half_precision_gain(proof: Proof, engine: str) -> Measured:
    """fp16's rate over fp32's with graphs and two slots; the worst batch size."""
    gains = {}
    for half in _resnet(proof, engine, "fp16"):
        exact = _beside(proof, half, precision="fp32")
        if half.setting.graphs and half.setting.slots == 2 and exact is not None:
            gains[half.setting.batch_size] = half.images_per_s / exact.images_per_s
    return _worst(gains)


def graph_gain(proof: Proof, engine: str) -> Measured:
    """Rates with and without CUDA graphs for the smallest network and batch, where launches weigh most."""
    for row in proof.bare:
        one = row.setting
        if (one.network, one.engine, one.batch_size) == (DIGITS, engine, 1) and one.graphs:
            plain = _beside(proof, row, graphs=False)
            if plain is not None:
                told = f"{row.images_per_s:.0f} against {plain.images_per_s:.0f} batches/s"
                return Measured(row.images_per_s / plain.images_per_s, told)
    return _NOTHING


def half_precision_error(proof: Proof, engine: str) -> Measured:
    rows = list(_half_precision(proof, engine))
    return Measured(max(row.max_relative_error for row in rows), _told(rows)) if rows else _NOTHING


def half_precision_agreement(proof: Proof, engine: str) -> Measured:
    """Over all pictures of all networks: with random weights, now and then two classes are all but equal."""
    rows = list(_half_precision(proof, engine))
    if not rows:
        return _NOTHING
    agreeing = sum(row.images * row.top1_agreement for row in rows)
    worst = min(rows, key=lambda row: row.top1_agreement)
    told = f"{_told(rows)}; worst {worst.network} with {worst.top1_agreement:.2%}"
    return Measured(agreeing / sum(row.images for row in rows), told)


AIMS = (
    Aim("ResNet-50: in-process core / bare engine", core_share, at_least=0.95),
    Aim("ResNet-50: HTTP with edge processes / bare engine", http_share, at_least=0.85),
    Aim("ResNet-50 fp16, batch >= 32: copy and launch time hidden by two slots", hidden_share, at_least=0.8),
    Aim("ResNet-50, batch >= 32: fp16 / fp32 without TF32", half_precision_gain, at_least=2.0),
    Aim("digits, batch 1: CUDA graphs / plain launches", graph_gain, at_least=1.2),
    Aim("fp16: largest relative error", half_precision_error, at_most=1e-2),
    Aim("fp16: top-1 agreement", half_precision_agreement, at_least=0.99),
)


def _is_of(its_engine: str, its_network: str, engine: str) -> bool:
    return its_engine == engine and its_network == RESNET


def _best_bare(proof: Proof, engine: str, precision: str | None = None) -> float | None:
    rates = [
        row.images_per_s
        for row in proof.bare
        if _is_of(row.setting.engine, row.setting.network, engine) and precision in (None, row.setting.precision)
    ]
    return max(rates, default=None)


def _resnet(proof: Proof, engine: str, precision: Precision) -> Iterator[BareRow]:
    for row in proof.bare:
        one = row.setting
        if _is_of(one.engine, one.network, engine) and one.precision == precision and one.batch_size >= LARGE_BATCH:
            yield row


def _beside(proof: Proof, row: BareRow, **other: object) -> BareRow | None:
    """The row whose setting differs in nothing but `other`."""
    wanted = {name: getattr(row.setting, name) for name in row.setting.__slots__} | other
    same = (one for one in proof.bare if all(getattr(one.setting, name) == wanted[name] for name in wanted))
    return next(same, None)


def _worst(by_batch: dict[int, float]) -> Measured:
    if not by_batch:
        return _NOTHING
    told = ", ".join(f"batch {size}: {value:.2f}" for size, value in sorted(by_batch.items()))
    return Measured(min(by_batch.values()), told)


def _half_precision(proof: Proof, engine: str) -> Iterator[Agreement]:
    return (row for row in proof.agreements if row.engine == engine and row.precision == "fp16")


def _told(rows: Iterable[Agreement]) -> str:
    rows = list(rows)
    networks = ", ".join(dict.fromkeys(row.network for row in rows))
    return f"{sum(row.images for row in rows)} pictures, {networks}"
