"""Does TensorRT for RTX run portable plans on this GPU at all, are they right, and what is gained by naming the GPU?

The vendor's list of GPUs has gaps (9.0 among them), so what the library says is kept word by word.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from convoy.app.engines.tensorrt_library import nameable_capabilities
from tests.gpu.proof.experiment import Bench, Judgement, Ran
from tests.gpu.proof.experiments import networks
from tests.gpu.proof.experiments.rtx import FAILURES, Built, Library, in_turns_ms
from tests.gpu.proof.experiments.rtx_opened import Opened, opened
from tests.gpu.proof.experiments.sessions import load_cpu_onnxruntime, on_cpu, relative_error

# Against fp32 on the CPU. Eight bits are as far off in ONNX Runtime: 1 % and 5 % on this network.
_MOST_ERROR = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2, "int8": 0.05, "fp8": 0.12}
_FOREIGN = ("8.0", "8.9")


def answers(bench: Bench, kinds: list[networks.Kind], sizes: list[int], **network: Any) -> None:
    """Every file by itself: built, asked about, loaded, run with the smallest and the largest batch."""
    library, ort = Library(), load_cpu_onnxruntime()
    bench.fact("library", f"{library.name} on compute capability {library.capability}")
    bench.fact("can be asked for", ", ".join(nameable_capabilities(library.trt)))
    for name, kind, model, reference, batch, names in _files(kinds, bench.folder, max(sizes), network):
        bench.step(f"{name}: building")
        try:
            plan = library.build(model, sizes)
            bench.fact(f"{name}: validity", library.validity(plan))
            bench.step(f"{name}: loading and running")
            expected = on_cpu(ort, reference, batch, names)
            with opened(library, plan, names=names) as one:
                for size in (min(sizes), max(sizes)):
                    one.settle(one.bind(batch[:size]))
                errors = [relative_error(one.answer(size), expected[:size]) for size in (min(sizes), max(sizes))]
            bench.figure(f"{name}: error as {kind}", max(errors))
            bench.fact(f"{name}: it says", library.said())
        except FAILURES as reason:
            bench.fact(f"{name}: refused", reason)


def _files(
    kinds: list[networks.Kind], folder: Path, most: int, network: dict[str, Any]
) -> Iterator[tuple[str, str, Path, Path, np.ndarray, tuple[str, str]]]:
    """(name, kind, file, its fp32 file, a batch, the tensors' names): an own network in all kinds, and the demo."""
    from tests.gpu.proof.subjects import make_digits

    for kind in kinds:
        model = networks.resnet_in(kind, folder, **network)
        batch = networks.pictures(most, network.get("side", 224))
        yield f"resnet {kind}", kind, model, folder / "fp32.onnx", batch, (networks.INPUT, networks.OUTPUT)
    digits = make_digits(folder, True)
    names = (digits.spec.inputs[0].name, digits.spec.outputs[0].name)
    for precision, model in digits.files.items():
        batch = digits.real[np.arange(most) % len(digits.real)]
        yield f"digits {precision}", precision, model, digits.files["fp32"], batch, names


def judge_answers(ran: Ran) -> Judgement:
    """All of them run, and none is further off than what it computes in explains."""
    errors = {name.partition(":")[0]: (value, name.rpartition(" ")[2]) for name, value in ran.figures.items()}
    wrong = [name for name, (error, kind) in errors.items() if error > _MOST_ERROR[kind]]
    refused = {name.partition(":")[0]: why for name, why in ran.facts.items() if name.endswith(": refused")}
    told = [f"{name} {error:.1e}" for name, (error, _) in errors.items()]
    told += [f"{name} is refused ({why[:200]})" for name, why in refused.items()]
    return Judgement.of(
        bool(errors) and not wrong and not refused,
        f"{ran.facts['library']}; {', '.join(told)}{'; too far off: ' if wrong else ''}{', '.join(wrong)}",
    )


def naming(bench: Bench, size: int, rounds: int, **network: Any) -> None:
    """A portable plan against one for this very GPU, in turns; where that cannot be named, what others' plans do."""
    library = Library()
    here, nameable = library.capability, nameable_capabilities(library.trt)
    bench.fact("this GPU", here)
    bench.figure("it can be named", here in nameable)
    networks.resnet_in("fp32", bench.folder, **network)
    model = networks.resnet_in("fp16", bench.folder, **network)
    batch = networks.pictures(size, network.get("side", 224))
    targets = {"portable": (), **{name: (name,) for name in ((here,) if here in nameable else _FOREIGN)}}
    running: dict[str, tuple[Opened, int]] = {}
    try:
        for name, capabilities in targets.items():
            bench.step(f"a plan that is {name}")
            try:
                plan = library.build(model, [size], capabilities=capabilities)
                bench.fact(f"{name}: validity", library.validity(plan))
                running[name] = _measured(bench, library, name, plan, batch)
            except FAILURES as reason:
                bench.fact(f"{name}: refused", reason)
        bench.step("in turns")
        for name, runs_ms in in_turns_ms(running, rounds).items():
            bench.figure(f"{name}: ms", median(runs_ms))
    finally:
        for one, _ in running.values():
            one.close()


def _measured(bench: Bench, library: Library, name: str, plan: Built, batch: np.ndarray) -> tuple[Opened, int]:
    bench.figure(f"{name}: plan MB", len(plan.data) / 1e6)
    one = Opened(library, plan)
    size = one.bind(batch)
    one.settle(size)
    bench.figure(f"{name}: context s", one.took[f"context {size}"])
    bench.figure(f"{name}: kernels MB", len(one.kernels()) / 1e6)
    return one, size


def judge_naming(ran: Ran) -> Judgement:
    """Where it can be named, that changes the speed by no more than a twentieth; else no plan for another one runs."""
    times = {name.partition(":")[0]: ms for name, ms in ran.figures.items() if name.endswith(": ms")}
    told = ", ".join(f"{name} {ms:.3f} ms" for name, ms in times.items())
    refused = [name for name in ran.facts if name.endswith(": refused")]
    here = ran.facts["this GPU"]
    if ran.figures["it can be named"]:
        ratio = times[here] / times["portable"]
        return Judgement.of(0.95 < ratio < 1.05, f"{told}: named takes {ratio:.2f} of portable's time")
    told = f"{here} cannot be named; {told}; refused: {', '.join(one.partition(':')[0] for one in refused) or 'none'}"
    return Judgement.of(set(times) == {"portable"}, told)
