"""What makes ONNX Runtime's convolutions fast or slow on this GPU: tensor cores, layout, fused bias, search.

`use_tf32`, `prefer_nhwc`, `fuse_conv_bias` and `cudnn_conv_algo_search`, each against its opposite, on ResNet-50.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from tests.gpu.proof.experiment import Bench, Judgement, NotMeasurable, Ran
from tests.gpu.proof.experiments import networks
from tests.gpu.proof.experiments.cudart import open_runtime
from tests.gpu.proof.experiments.sessions import Session, Way, load_onnxruntime, on_cpu, opened, relative_error

_ROUNDS = 15
_COMPARED = 4


def use_tf32(bench: Bench, precision: str, sizes: list[int], **network: Any) -> None:
    """Both values, in both layouts."""
    ways = [Way(tf32=tf32, nhwc=nhwc) for nhwc, tf32 in product((True, False), (True, False))]
    _compare(bench, precision, ways, sizes, network)


def fuse_conv_bias(bench: Bench, precision: str, sizes: list[int], **network: Any) -> None:
    """Both values, in both layouts."""
    half, both = precision == "fp16", (True, False)
    ways = [Way(tf32=half, nhwc=nhwc, fuse_bias=fuse) for nhwc, fuse in product(both, both)]
    _compare(bench, precision, ways, sizes, network)


def search(bench: Bench, precision: str, sizes: list[int], **network: Any) -> None:
    """How cudnn chooses, and what the choice takes."""
    ways = [Way(search=name, tf32=precision == "fp16") for name in ("HEURISTIC", "EXHAUSTIVE", "DEFAULT")]
    _compare(bench, precision, ways, sizes, network)


def _compare(bench: Bench, precision: str, ways: list[Way], sizes: list[int], network: dict[str, Any]) -> None:
    runtime, ort = open_runtime(), load_onnxruntime()
    bench.step("writing the network")
    model = networks.resnet(bench.folder / "network.onnx", half=precision == "fp16", **network)
    exact = networks.resnet(bench.folder / "exact.onnx", half=False, **network)
    batch = networks.pictures(max(sizes), network.get("side", 224))
    bench.step("the CPU's answers")
    expected = on_cpu(ort, exact, batch[:_COMPARED])
    for way in ways:
        name = f"{way} {way.search}" if len({one.search for one in ways}) > 1 else str(way)
        try:
            with opened(runtime, ort, model, way) as session:
                _measure(bench, name, session, batch, sizes)
                answer = session.answer(sizes[-1])[:_COMPARED]
                bench.figure(f"{name}: error", relative_error(answer, expected[: len(answer)]))
        except NotMeasurable:
            raise
        except Exception as error:  # a way that cuDNN has no plan for says so, and the others go on
            bench.fact(f"{name}: refused", error)


def _measure(bench: Bench, name: str, session: Session, batch: np.ndarray, sizes: list[int]) -> None:
    for size in sizes:
        bench.step(f"{name} batch {size}")
        session.bind(batch[:size])
        bench.figure(f"{name} batch {size}: first ms", session.settle(size))
        bench.figure(f"{name} batch {size}: ms", session.median_ms(size, _ROUNDS))


def _best_ms(ran: Ran, word: str, batch: int) -> float:
    """The faster layout's time with this option."""
    found = [ms for name, ms in ran.figures.items() if word in name and name.endswith(f"batch {batch}: ms")]
    return min(found)


def _largest(ran: Ran) -> int:
    return max(int(name.split("batch ")[1].partition(":")[0]) for name in ran.figures if "batch " in name)


def _error(ran: Ran, word: str) -> float:
    return max(error for name, error in ran.figures.items() if word in name and name.endswith(": error"))


def judge_tf32_fp16(ran: Ran) -> Judgement:
    """Forbidding TF32 takes the tensor cores from FP16, too: a third slower at least."""
    size = _largest(ran)
    off, on = _best_ms(ran, "tf32 0", size), _best_ms(ran, "tf32 1", size)
    told = f"batch {size}: {off:.2f} ms with use_tf32 0, {on:.2f} ms with 1; error {_error(ran, 'tf32 1'):.1e}"
    return Judgement.of(off > 1.3 * on, told)


def judge_tf32_fp32(ran: Ran) -> Judgement:
    """TF32 is faster and less exact; without it FP32 is exact to rounding."""
    size = _largest(ran)
    off, on = _best_ms(ran, "tf32 0", size), _best_ms(ran, "tf32 1", size)
    exact, rough = _error(ran, "tf32 0"), _error(ran, "tf32 1")
    told = f"batch {size}: {off:.2f} ms and error {exact:.1e} with use_tf32 0, {on:.2f} ms and {rough:.1e} with 1"
    return Judgement.of(on < off and exact < 1e-4 < rough, told)


def judge_fusing(ran: Ran) -> Judgement:
    """Fusing the bias is faster by more than noise."""
    size = _largest(ran)
    off, on = _best_ms(ran, "fuse 0", size), _best_ms(ran, "fuse 1", size)
    told = f"batch {size}: {off:.2f} ms with fuse_conv_bias 0, {on:.2f} ms with 1; error {_error(ran, 'fuse 1'):.1e}"
    return Judgement.of(on < 0.98 * off, told)


def judge_search(ran: Ran) -> Judgement:
    """The exhaustive search is another heuristic: within a tenth of the other, and it does not take minutes."""
    size = _largest(ran)
    times = {word: _best_ms(ran, word, size) for word in ("HEURISTIC", "EXHAUSTIVE", "DEFAULT")}
    first = {word: _first_ms(ran, word, size) for word in times}
    told = ", ".join(f"{word} {ms:.2f} ms after {first[word]:.0f} ms" for word, ms in times.items())
    likeness = times["EXHAUSTIVE"] / times["HEURISTIC"]
    return Judgement.of(0.9 < likeness < 1.1 and first["EXHAUSTIVE"] < 60_000, f"batch {size}: {told}")


def _first_ms(ran: Ran, word: str, batch: int) -> float:
    return next(ms for name, ms in ran.figures.items() if word in name and name.endswith(f"batch {batch}: first ms"))


def size_changes(bench: Bench, precision: str, small: int, large: int, **network: Any) -> None:
    """Each size again and again, then both in turns; without graphs and with them."""
    runtime, ort = open_runtime(), load_onnxruntime()
    bench.step("writing the network")
    model = networks.resnet(bench.folder / "network.onnx", half=precision == "fp16", **network)
    batch = networks.pictures(large, network.get("side", 224))
    for graphs in (False, True):
        way = Way(graphs=graphs)
        with opened(runtime, ort, model, way) as session:
            for size in (small, large):
                bench.step(f"graphs {graphs:d} batch {size} alone")
                session.bind(batch[:size])
                session.settle(size)
                bench.figure(f"graphs {graphs:d} batch {size} alone: ms", session.median_ms(size, _ROUNDS))
            bench.step(f"graphs {graphs:d} in turns")
            turns = [(session.run_ms(small), session.run_ms(large)) for _ in range(_ROUNDS)]
            for index, size in enumerate((small, large)):
                times = sorted(turn[index] for turn in turns)
                bench.figure(f"graphs {graphs:d} batch {size} in turns: ms", times[len(times) // 2])


def judge_size_changes(ran: Ran) -> Judgement:
    """Without graphs a change of size costs several batches' time, with them nothing."""
    cost = {graphs: _in_turns(ran, graphs) / _alone(ran, graphs) for graphs in (0, 1)}
    told = (
        f"two batches take {_alone(ran, 0):.1f} ms alone and {_in_turns(ran, 0):.1f} ms in turns without graphs, "
        f"{_alone(ran, 1):.1f} and {_in_turns(ran, 1):.1f} ms with them"
    )
    return Judgement.of(cost[0] > 3 and cost[1] < 1.2, told)


def _alone(ran: Ran, graphs: int) -> float:
    return sum(ms for name, ms in ran.figures.items() if name.startswith(f"graphs {graphs}") and "alone" in name)


def _in_turns(ran: Ran, graphs: int) -> float:
    return sum(ms for name, ms in ran.figures.items() if name.startswith(f"graphs {graphs}") and "turns" in name)
