"""What is made of the figures of TensorRT for RTX, which are made up here: every verdict can come out either way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.gpu.proof.experiment import Ran
from tests.gpu.proof.parts_rtx import RTX_EXPERIMENTS

ROWS = {one.name: one for one in RTX_EXPERIMENTS}


def figures(verdict: str, name: str, found: Mapping[str, float], **facts: str) -> Any:
    return pytest.param(name, Ran("done", figures=dict(found), facts=facts), verdict, id=f"{name}, {verdict}")


def start(**changed: float) -> dict[str, float]:
    return {
        **{"cold: whole s": 8.0, "warm: whole s": 1.0, "second process: whole s": 1.5, "cold: kernels MB": 3.0},
        **{"second process: kernels grew by bytes": 0, "spoilt kernels are taken": 0},
        **{
            name.replace("_", " ").replace("second process ", "second process: "): value
            for name, value in changed.items()
        },
    }


def strategies(**ms: float) -> dict[str, float]:
    what = ("context ms", "first ms", "ms")
    return {f"{one} batch {size}: {name}": ms[one] for one in ms for size in (1, 32) for name in what}


def by_way(**ms: float) -> dict[str, float]:
    return {f"{one} batch {size}: ms": value for one, value in ms.items() for size in (1, 32)}


def two_plans(range_ms: float, range_mb: float) -> dict[str, float]:
    names = ("start s", "device MB", "kernels MB")
    return {
        **by_way(range=range_ms, each=1.0),
        **{"range: plan MB": range_mb, "each: plan MB": 40.0},
        **{f"{how}: {name}": 1.0 for how in ("range", "each") for name in names},
    }


def gains(base: str, **found: float) -> dict[str, float]:
    return {f"{name.replace('_', ' ')} batch 32: gain over {base}": gain for name, gain in found.items()}


def beside(failed: float) -> dict[str, float]:
    return {
        f"thread {mode}: {what}": value
        for mode in ("thread-local", "global")
        for what, value in (("captures", 9), ("captures failed", failed), ("contexts", 3), ("contexts failed", 0))
    }


TAKEN_OVER = {f"{how}: {what}": 1.0 for how in ("cold", "warm") for what in ("ready s", "takeover s")}
SERVED = {
    **{"cold: first": "onnxruntime-cpu int8", "cold: at last": "tensorrt-rtx fp16"},
    **{"warm: first": "tensorrt-rtx fp16", "warm: at last": "tensorrt-rtx fp16", "cold: why not others": "no plan"},
}
CASES: list[Any] = [
    figures("as expected", "rtx-answers", {"resnet fp16: error as fp16": 1e-3}, library="rtx"),
    figures("otherwise", "rtx-answers", {"resnet fp16: error as fp16": 2e-2}, library="rtx"),
    figures("otherwise", "rtx-answers", {"a fp16: error as fp16": 0.0}, **{"library": "rtx", "b: refused": "why"}),
    figures("as expected", "rtx-start", start()),
    figures("otherwise", "rtx-start", start(second_process_whole_s=7.0)),
    figures("otherwise", "rtx-start", start(spoilt_kernels_are_taken=1)),
    figures("otherwise", "rtx-start", start(second_process_kernels_grew_by_bytes=900)),
    figures("as expected", "rtx-specialisation", strategies(EAGER=1.0, LAZY=1.02, NONE=1.3)),
    figures("otherwise", "rtx-specialisation", strategies(EAGER=1.0, LAZY=1.02, NONE=1.0)),
    figures("otherwise", "rtx-specialisation", strategies(EAGER=1.0, LAZY=1.4, NONE=1.3)),
    figures("as expected", "rtx-profiles", two_plans(1.02, 24.0)),
    figures("otherwise", "rtx-profiles", two_plans(1.2, 24.0)),
    figures("otherwise", "rtx-profiles", two_plans(1.0, 41.0)),
    figures("as expected", "rtx-graphs", by_way(own=1.0, library=1.01, nobody=1.4)),
    figures("otherwise", "rtx-graphs", by_way(own=1.0, library=0.8, nobody=1.4)),
    figures("otherwise", "rtx-graphs", by_way(own=1.0, library=1.0)),
    figures("as expected", "rtx-precisions", gains("fp16", fp32=0.4, bf16=1.0, int8=1.3, fp8=1.2)),
    figures("otherwise", "rtx-precisions", gains("fp16", fp32=0.4, bf16=1.0, int8=1.3, fp8=0.9)),
    figures("otherwise", "rtx-precisions", gains("fp16", fp32=0.4, bf16=1.0, int8=1.3)),
    figures(
        "as expected",
        "rtx-resnet50",
        {
            **gains("tensorrt-rtx fp16", onnxruntime_fp16=0.8, **{"tensorrt-rtx_int8": 1.4}),
            **gains("rtx", compiled=0.7),
        },
    ),
    figures(
        "otherwise", "rtx-resnet50", gains("tensorrt-rtx fp16", onnxruntime_fp16=1.3, **{"tensorrt-rtx_int8": 1.4})
    ),
    figures(
        "as expected", "rtx-naming", {"9.0: ms": 1.0, "portable: ms": 1.01, "it can be named": 1}, **{"this GPU": "9.0"}
    ),
    figures(
        "otherwise", "rtx-naming", {"9.0: ms": 0.8, "portable: ms": 1.0, "it can be named": 1}, **{"this GPU": "9.0"}
    ),
    figures(
        "otherwise", "rtx-naming", {"8.9: ms": 1.0, "portable: ms": 1.0, "it can be named": 0}, **{"this GPU": "9.0"}
    ),
    figures("as expected", "rtx-captures", beside(0)),
    figures("otherwise", "rtx-captures", beside(2)),
    figures("as expected", "rtx-contexts", {"batch 1: worst error": 1e-4, "batch 1: a further context MB": 3.0}),
    figures("otherwise", "rtx-contexts", {"batch 1: worst error": 1e9, "batch 1: a further context MB": 3.0}),
    figures("otherwise", "rtx-and-tensorrt", {"rtx: error": 1e-4, "tensorrt: error": 1e-4}, libraries="both"),
    figures("as expected", "rtx-takeover", {**TAKEN_OVER, "cold: failed": 0, "warm: failed": 0}, **SERVED),
    figures("otherwise", "rtx-takeover", {**TAKEN_OVER, "cold: failed": 2, "warm: failed": 0}, **SERVED),
    figures(
        "otherwise",
        "rtx-takeover",
        {**TAKEN_OVER, "cold: failed": 0, "warm: failed": 0},
        **{**SERVED, "warm: first": "onnxruntime-cpu int8"},
    ),
]


@pytest.mark.parametrize(("name", "ran", "verdict"), CASES)
def test_verdicts(name: str, ran: Ran, verdict: str) -> None:
    judgement = ROWS[name].judged(ran)
    assert judgement.verdict == verdict, judgement.told
