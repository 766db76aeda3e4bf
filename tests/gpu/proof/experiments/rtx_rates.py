"""What the precisions are worth under TensorRT for RTX, and how it compares with what else computes here.

Everything runs in turns, so that every ratio is of figures of one breath; its spread is that of the rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from convoy.app.batch import EngineFailure
from convoy.app.engines.base import Engine
from convoy.app.engines.measure import Probe, make_probe
from convoy.models.errors import ConvoyError
from tests.gpu.proof.experiment import Bench, Judgement, NotMeasurable, Ran
from tests.gpu.proof.experiments import networks
from tests.gpu.proof.experiments.rtx import FAILURES, Library, in_turns_ms
from tests.gpu.proof.experiments.rtx_opened import opened
from tests.gpu.proof.experiments.sessions import Way, load_onnxruntime
from tests.gpu.proof.experiments.sessions import opened as opened_session

_ONNXRUNTIME = "onnxruntime fp16"
_COMPILED = "torch.compile"
_BASE = "fp16"
_SHORTEST_MS = 1e-6


def precisions(bench: Bench, kinds: list[networks.Kind], sizes: list[int], rounds: int, **network: Any) -> None:
    """The same network in every kind, and in FP16 under ONNX Runtime where its provider is here."""
    library = Library()
    bench.step("writing the networks")
    models = {kind: networks.resnet_in(kind, bench.folder, **network) for kind in kinds}
    batch = networks.pictures(max(sizes), network.get("side", 224))
    with ExitStack() as owned:
        running: dict[str, Any] = {}
        for kind, model in models.items():
            bench.step(f"{kind}: building and compiling")
            try:
                one = owned.enter_context(opened(library, library.build(model, sizes)))
                for size in sizes:
                    one.bind(batch[:size])
                    one.settle(size)
                running[kind] = one
            except FAILURES as reason:
                bench.fact(f"{kind}: refused", reason)
        bench.step(_ONNXRUNTIME)
        try:
            way = Way(graphs=True)
            session = owned.enter_context(opened_session(library.runtime, load_onnxruntime(), models[_BASE], way))
            for size in sizes:
                session.bind(batch[:size])
                session.settle(size)
            running[_ONNXRUNTIME] = session
        except NotMeasurable as reason:
            bench.fact(f"{_ONNXRUNTIME}: not here", reason)
        for size in sizes:
            bench.step(f"batch {size} in turns")
            _note(bench, size, in_turns_ms({name: (one, size) for name, one in running.items()}, rounds), _BASE)


def _note(bench: Bench, size: int, taken_ms: Mapping[str, list[float]], base: str) -> None:
    """Rates, and how much faster than `base` each is: in the middle, and at the spread's ends."""
    times = {name: np.maximum(runs_ms, _SHORTEST_MS) for name, runs_ms in taken_ms.items()}
    for name, runs_ms in times.items():
        bench.figure(f"{name} batch {size}: images/s", size * 1e3 / float(np.median(runs_ms)))
        if base in times and name != base:
            gains = times[base] / runs_ms
            for where, gain in zip(("low", "gain", "high"), np.percentile(gains, [10, 50, 90]), strict=True):
                bench.figure(f"{name} batch {size}: {where} over {base}", float(gain))


def judge_precisions(ran: Ran) -> Judgement:
    """In large batches FP16 is half as fast again as FP32 and more, BF16 is as fast, eight bits are a tenth faster."""
    gains = _gains(ran, _BASE)
    large = max(size for _, size in gains)
    found = {name: gain for (name, size), gain in gains.items() if size == large}
    told = ", ".join(f"{name} {gain:.2f}" for name, gain in found.items())
    is_expected = found["fp32"] < 1 / 1.5 and 0.9 < found["bf16"] < 1.1 and min(found["int8"], found["fp8"]) > 1.1
    return Judgement.of(is_expected, f"of fp16's rate at batch {large}: {told}; {_refusals(ran)}")


def others(bench: Bench, network: str, sizes: list[int], compiled_sizes: list[int], rounds: int) -> None:
    """The house's engines on one network of the benchmark, in every precision that it has a file for."""
    import tempfile

    from convoy.app.engines.machine import find_machine
    from tests.gpu.proof import kinds
    from tests.gpu.proof.budget import Budget
    from tests.gpu.proof.grid import Opening
    from tests.gpu.proof.subjects import NotMade, torchvision_maker
    from tests.gpu.proof.targets import RTX

    machine = find_machine()
    if not machine.gpus or machine.rtx.module is None:
        raise NotMeasurable(machine.no_gpu or machine.rtx.reason)
    plans = Path(tempfile.mkdtemp(dir=bench.folder))
    found = {
        one.name: one for one in kinds.find_kinds(machine, plans, Budget(bench.left_s), kinds.build, kinds.torch_on_gpu)
    }
    bench.step(f"exporting {network}")
    try:
        subject = torchvision_maker(network)(bench.folder, True)
    except NotMade as reason:
        raise NotMeasurable(str(reason)) from reason
    with ExitStack() as owned:
        engines: dict[str, Engine] = {}
        wanted = [(kind, precision) for kind in found.values() if not kind.missing for precision in kind.precisions]
        for kind, precision in wanted:
            # The others are what RTX is held against: at their best.
            if precision in subject.files and (kind.name == RTX or precision != "fp32"):
                name = f"{kind.name} {precision}"
                bench.step(name)
                try:
                    engine = kind.open(subject, Opening(subject.name, kind.name, precision, True, 1), tuple(sizes))
                    owned.callback(engine.close)
                    engine.warm_up()
                    engines[name] = engine
                except (ConvoyError, EngineFailure, NotMade) as reason:
                    bench.fact(f"{name}: refused", reason)
        base = f"{RTX} fp16"
        for size in sizes:
            bench.step(f"batch {size} in turns")
            _note(bench, size, _computed_in_turns_ms(engines, size, rounds), base)
        for kind in found.values():
            if kind.missing:
                bench.fact(f"{kind.name}: not here", kind.missing)
        # Last, because compiling may take whatever time is left.
        _beside_compiled(bench, subject, machine, engines.get(base), compiled_sizes, rounds)


def _computed_in_turns_ms(engines: Mapping[str, Engine], size: int, rounds: int) -> dict[str, list[float]]:
    """What each batch computed, without its copies."""
    probes = {name: (_Computing(make_probe(engine, size)), size) for name, engine in engines.items()}
    in_turns_ms(probes, 2)
    return in_turns_ms(probes, rounds)


class _Computing:
    """A probe that tells what the device computed."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def run_ms(self, size: int) -> float:
        return self._probe.engine.run([self._probe.part]).times.compute_ns / 1e6


def _beside_compiled(
    bench: Bench, subject: Any, machine: Any, base: Engine | None, sizes: list[int], rounds: int
) -> None:
    from tests.gpu.proof.kinds import torch_on_gpu
    from tests.gpu.proof.subjects import NotMade
    from tests.gpu.proof.torch_engine import TorchEngine, with_front

    if base is None:
        return
    bench.step(_COMPILED)
    try:
        torch = torch_on_gpu()
        front = with_front(torch, deepcopy(subject.make_network()), subject.spec, "fp16").to(machine.gpus[0].name)
        engine = TorchEngine(
            torch.compile(front, dynamic=False),
            machine.gpus[0],
            torch,
            subject.spec,
            batch_sizes=tuple(sizes),
            precision="fp16",
            slots=1,
        )
    except (NotMade, EngineFailure) as reason:
        bench.fact(f"{_COMPILED}: not here", reason)
        return
    try:
        engine.warm_up()
        for size in sizes:
            bench.step(f"{_COMPILED} batch {size} in turns")
            pair = {"rtx": base, _COMPILED: engine}
            _note(bench, size, _computed_in_turns_ms(pair, size, rounds), "rtx")
    except Exception as reason:  # whatever its compiler raises
        bench.fact(f"{_COMPILED}: refused", reason)
    finally:
        engine.close()


def judge_others(ran: Ran) -> Judgement:
    """Nobody else is faster at FP16, and a file of eight bits is faster still in the largest batch."""
    gains = {**_gains(ran, "tensorrt-rtx fp16"), **_gains(ran, "rtx")}
    rivals = {key: gain for key, gain in gains.items() if not key[0].startswith("tensorrt-rtx")}
    large = max(size for _, size in gains)
    own = {name: gain for (name, size), gain in gains.items() if size == large and name not in {n for n, _ in rivals}}
    told = [f"{name} at batch {size}: {gain:.2f}" for (name, size), gain in rivals.items()]
    told += [f"{name} at batch {large}: {gain:.2f}" for name, gain in own.items()]
    eight = [gain for name, gain in own.items() if name.endswith(("int8", "fp8"))]
    is_expected = all(gain < 1.02 for gain in rivals.values()) and bool(eight) and max(eight) > 1.05
    return Judgement.of(is_expected, f"of RTX's FP16 rate: {', '.join(told)}; {_refusals(ran)}")


def _gains(ran: Ran, base: str) -> dict[tuple[str, int], float]:
    """By (name, batch size)."""
    return {key: gain for name, gain in ran.figures.items() for key in _gain_of(name, base)}


def _gain_of(name: str, base: str) -> Iterator[tuple[str, int]]:
    where, _, what = name.partition(": ")
    if what == f"gain over {base}":
        one, _, size = where.rpartition(" batch ")
        yield one, int(size)


def _refusals(ran: Ran) -> str:
    found = [f"{name} ({why[:120]})" for name, why in ran.facts.items() if name.endswith((": refused", ": not here"))]
    return "; ".join(found) or "nothing was refused"
