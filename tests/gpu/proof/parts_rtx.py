"""Parts 5 and 6 of the table: TensorRT for RTX by itself, and against what else computes here.

Part 5 alone says whether it works on a GPU; its first rows say whether it runs there at all.
"""

from __future__ import annotations

from tests.gpu.proof.experiment import Experiment
from tests.gpu.proof.experiments import (
    house,
    rtx_answers,
    rtx_beside,
    rtx_house,
    rtx_rates,
    rtx_start,
    rtx_ways,
)

PART, RIVALS_PART = 5, 6
TITLES = {
    PART: "TensorRT for RTX: whether it runs here, starts, choices, rates, neighbours, a server",
    RIVALS_PART: "TensorRT for RTX against ONNX Runtime and torch.compile",
}
_KINDS = ["fp32", "fp16", "bf16", "int8", "fp8"]
_SIZES = [1, 8, 32, 128]
_SMALL = {"side": 64, "blocks": [1, 1, 1, 1], "width": 32, "classes": 10}

RTX_EXPERIMENTS = (
    Experiment(
        *("rtx-answers", PART, "Does TensorRT for RTX run portable plans here, in every precision, and rightly?"),
        *("yes, each to its precision", rtx_answers.answers, rtx_answers.judge_answers),
        about_s=40,
        limit_s=150,
        arguments={"kinds": _KINDS, "sizes": [1, 8, 32], **_SMALL},
    ),
    Experiment(
        *("rtx-tests", PART, "Do the tests marked `gpu` pass that are about TensorRT for RTX?"),
        *("all of them", rtx_house.gpu_tests, house.judge_tests),
        about_s=30,
        limit_s=120,
    ),
    Experiment(
        *("rtx-start", PART, "From opening a plan to the first answers: what do kept kernels save?"),
        *("half of the time and more; spoilt ones are refused", rtx_start.start, rtx_start.judge_start),
        about_s=40,
        limit_s=150,
        arguments={"sizes": [1, 8, 32]},
    ),
    Experiment(
        *("rtx-specialisation", PART, "Kernels for a size: compiled eagerly, lazily or never?"),
        *("eagerly is as fast as lazily, which is slow at first; never is slower", rtx_ways.specialisation),
        rtx_ways.judge_specialisation,
        about_s=35,
        limit_s=150,
        arguments={"sizes": _SIZES, "rounds": 30, "settling_s": 1.0},
    ),
    Experiment(
        *("rtx-profiles", PART, "One dynamic profile for all sizes, or a static one for each?"),
        *("one is as fast, to a twentieth, and smaller", rtx_ways.profiles, rtx_ways.judge_profiles),
        about_s=35,
        limit_s=150,
        arguments={"sizes": _SIZES, "rounds": 30},
    ),
    Experiment(
        *("rtx-graphs", PART, "Graphs: our own, the library's, or none?"),
        *("ours are as fast as the library's, and faster than none at batch 1", rtx_ways.graphs),
        rtx_ways.judge_graphs,
        about_s=30,
        limit_s=120,
        arguments={"sizes": [1, 8, 32], "rounds": 60},
    ),
    Experiment(
        *("rtx-precisions", PART, "What are FP16, BF16, INT8 and FP8 worth on ResNet-50?"),
        *("FP16 half as fast again as FP32 and more, BF16 alike, eight bits a tenth faster", rtx_rates.precisions),
        rtx_rates.judge_precisions,
        about_s=60,
        limit_s=210,
        arguments={"kinds": _KINDS, "sizes": _SIZES, "rounds": 25},
    ),
    Experiment(
        *("rtx-takeover", PART, "How soon does `convoy serve` answer, and how soon from the plan?"),
        *("from something else first; from the plan at once when it starts again", rtx_house.takeover),
        rtx_house.judge_takeover,
        about_s=50,
        limit_s=150,
        arguments={"engines": "auto", "wait_s": 45.0},
    ),
    Experiment(
        *("rtx-naming", PART, "Is a plan for this very GPU faster than a portable one?"),
        *("no; and where it cannot be named, plans for others do not run", rtx_answers.naming),
        rtx_answers.judge_naming,
        about_s=25,
        limit_s=120,
        arguments={"size": 32, "rounds": 40},
    ),
    Experiment(
        *("rtx-captures", PART, "Do another engine's captures survive while contexts are compiled?"),
        *("in a thread whose own mode is thread-local", rtx_beside.capture_beside, rtx_beside.judge_capture_beside),
        about_s=25,
        limit_s=120,
        arguments={"size": 8, "rounds": 3},
    ),
    Experiment(
        *("rtx-contexts", PART, "Can several contexts share a profile, and what does each of them take?"),
        *("yes; less than 100 MB", rtx_beside.contexts, rtx_beside.judge_contexts),
        about_s=20,
        limit_s=90,
        arguments={"sizes": [1, 32], "each": 4},
    ),
    Experiment(
        *("rtx-and-tensorrt", PART, "Do TensorRT and TensorRT for RTX run in one process?"),
        *("yes", rtx_beside.both_libraries, rtx_beside.judge_both),
        about_s=25,
        limit_s=120,
        arguments={"size": 4, **_SMALL},
    ),
    Experiment(
        *("rtx-resnet50", RIVALS_PART, "ResNet-50 against ONNX Runtime and torch.compile: who is faster?"),
        *("TensorRT for RTX in FP16, and in eight bits still more", rtx_rates.others, rtx_rates.judge_others),
        about_s=110,
        limit_s=270,
        arguments={"network": "resnet50", "sizes": _SIZES, "compiled_sizes": [1, 32], "rounds": 25},
    ),
    Experiment(
        *("rtx-mobilenet", RIVALS_PART, "MobileNetV2 against ONNX Runtime and torch.compile: who is faster?"),
        *("TensorRT for RTX in FP16, and in eight bits still more", rtx_rates.others, rtx_rates.judge_others),
        about_s=110,
        limit_s=270,
        arguments={"network": "mobilenet_v2", "sizes": _SIZES, "compiled_sizes": [1, 32], "rounds": 25},
    ),
)
