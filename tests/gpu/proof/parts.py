"""The table of experiments: part by part, and within a part the most telling first.

Each row says what is asked and what is expected before anything has run; where that is wrong, the page will say
"otherwise", which is as good an answer. Extension: one more row.
"""

from __future__ import annotations

from tests.gpu.proof import parts_rtx
from tests.gpu.proof.experiment import Experiment
from tests.gpu.proof.experiments import (
    assignment,
    breakage,
    captures,
    convolutions,
    graphs,
    house,
    machine,
    resets,
    waiting,
)
from tests.gpu.proof.targets import ONNXRUNTIME

TITLES = {
    0: "the machine, and whether ONNX Runtime's CUDA provider loads",
    1: "the driver: tests, captures, broken devices, waiting",
    2: "ONNX Runtime: tensor cores, changes of size, graphs, shapes, resets",
    3: "the benchmark with every engine that is here",
    4: "the tree under ONNX Runtime, the switch interval, a server",
    **parts_rtx.TITLES,
}
_ALLOCATING = ["cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "cudaHostRegister"]
_WAITING = [
    *("cudaStreamSynchronize", "cudaEventSynchronize", "cudaEventQuery", "cudaMemGetInfo", "cudaStreamCreateWithFlags"),
]
_SIZES = [1, 32, 128]

# Its answer is the GPU's name; no row of the book.
IDENTIFY = Experiment(
    "identify", 0, "Which GPU?", "one", machine.identify, machine.judge_description, about_s=5, limit_s=60
)

EXPERIMENTS = (
    Experiment(
        *("machine", 0, "On what does all of this run?", "a GPU with a driver, and a library that computes on it"),
        *(machine.describe, machine.judge_description),
        about_s=10,
        limit_s=60,
    ),
    Experiment(
        *("provider-loads", 0, "Does ONNX Runtime's CUDA provider load, and answer as the CPU does?"),
        *("yes, with an error below 1e-3", machine.provider_loads, machine.judge_provider),
        about_s=20,
        limit_s=120,
    ),
    Experiment(
        *("provider-architectures", 0, "Has the provider machine code for this GPU?"),
        *("of its generation; no PTX, and nothing for sm_100", machine.provider_architectures),
        machine.judge_architectures,
        about_s=10,
        limit_s=60,
    ),
    Experiment(
        *("gpu-tests", 1, "Do the tests marked `gpu` pass?", "all of them", house.gpu_tests, house.judge_tests),
        about_s=60,
        limit_s=150,
    ),
    Experiment(
        *("capture-and-device-wait", 1, "Does cudaDeviceSynchronize in one thread disturb a capture in another?"),
        *("in every mode; the error (900 or 901) ends with the capture", captures.collide),
        captures.judge_device_wide,
        about_s=10,
        limit_s=90,
        arguments={"calls": ["cudaDeviceSynchronize"]},
    ),
    Experiment(
        *("capture-and-memory", 1, "Do allocating and freeing in one thread disturb a capture in another?"),
        *("not in a thread whose own mode is thread-local", captures.collide, captures.judge_harmless),
        about_s=10,
        limit_s=90,
        arguments={"calls": _ALLOCATING},
    ),
    Experiment(
        *("capture-and-waits", 1, "Do waits for streams and events in one thread disturb a capture in another?"),
        *("not in a thread whose own mode is thread-local", captures.collide, captures.judge_harmless),
        about_s=10,
        limit_s=90,
        arguments={"calls": _WAITING},
    ),
    Experiment(
        *("reset-after-illegal-address", 1, "Does cudaDeviceReset heal a process whose kernel wrote to address 8?"),
        *("every call fails with 700 until the reset, and works after it", breakage.after_bad_kernel),
        breakage.judge_reset,
        about_s=10,
        limit_s=60,
        arguments={"kind": "address"},
        may_crash=True,
    ),
    Experiment(
        *("reset-after-trap", 1, "Does cudaDeviceReset heal a process whose kernel trapped?"),
        *("every call fails with 719 until the reset, and works after it", breakage.after_bad_kernel),
        breakage.judge_reset,
        about_s=10,
        limit_s=60,
        arguments={"kind": "trap"},
        may_crash=True,
    ),
    Experiment(
        *("cpu-while-waiting", 1, "What does a wait for the device cost the CPU, by the event's flags?"),
        *("a whole core with flags 0, nearly nothing with blocking sync", waiting.cpu_while_waiting),
        waiting.judge_waiting,
        about_s=15,
        limit_s=90,
        arguments={"buffer_mib": 2048, "long_s": 0.2},
    ),
    Experiment(
        *("page-locking", 1, "How long does page-locking a slab take, and who stands still meanwhile?"),
        *("over 20 ms for 1 GiB; other Python threads go on", waiting.page_locking, waiting.judge_page_locking),
        about_s=10,
        limit_s=60,
        arguments={"sizes_mib": [64, 256, 1024]},
    ),
    Experiment(
        *("bus-id", 1, "What do the bindings give for the bus id, byte by byte?"),
        *("no NUL but at the end; NVML knows the device by it", waiting.bus_id, waiting.judge_bus_id),
        about_s=5,
        limit_s=30,
    ),
    Experiment(
        *("tf32-and-fp16", 2, "Does use_tf32=0 take the tensor cores from FP16 convolutions, too?"),
        *("yes: at least 1.3 times slower than with 1", convolutions.use_tf32, convolutions.judge_tf32_fp16),
        about_s=40,
        limit_s=180,
        arguments={"precision": "fp16", "sizes": _SIZES},
    ),
    Experiment(
        *("size-changes", 2, "What does a change of batch size cost without CUDA graphs, and with them?"),
        *("three times the batches' time and more without; nothing with", convolutions.size_changes),
        convolutions.judge_size_changes,
        about_s=30,
        limit_s=150,
        arguments={"precision": "fp16", "small": 1, "large": 32},
    ),
    Experiment(
        *("shape-nodes", 2, "Are graphs refused whose shapes are worked out on the CPU (Resize by size)?"),
        *("refused with disable_cpu_ep_fallback; without it only shape nodes run there", assignment.shape_nodes),
        assignment.judge_shape_nodes,
        about_s=10,
        limit_s=90,
    ),
    Experiment(
        *("replay-after-captures", 2, "Do all sizes answer right when all of them have been captured?"),
        *("as plain runs do, to rounding", graphs.replay_after_captures, graphs.judge_replays),
        about_s=25,
        limit_s=150,
        arguments={"precision": "fp16", "sizes": [1, 8, 32, 128]},
    ),
    Experiment(
        *("session-after-reset", 2, "Can ONNX Runtime be used again in a process whose device was reset?"),
        *("no: a new session fails, or the process dies", resets.session_after_reset),
        resets.judge_session_after_reset,
        about_s=15,
        limit_s=90,
        may_crash=True,
    ),
    Experiment(
        *("close-after-break", 2, "Can a session with a captured graph be closed on a broken device?"),
        *("no: std::terminate ends the process (SIGABRT)", resets.close_after_break, resets.judge_close_after_break),
        about_s=15,
        limit_s=90,
        may_crash=True,
    ),
    Experiment(
        *(
            "disturbed-captures",
            2,
            "How often does ONNX Runtime's capture fail beside a thread that waits or allocates?",
        ),
        *("with waits for the device; not with a thread-local thread's allocations", graphs.disturbed_captures),
        graphs.judge_disturbed,
        about_s=40,
        limit_s=150,
        arguments={"attempts": 5},
    ),
    Experiment(
        *("fused-bias", 2, "Is fuse_conv_bias=1 faster?", "by 2 % and more", convolutions.fuse_conv_bias),
        convolutions.judge_fusing,
        about_s=40,
        limit_s=180,
        arguments={"precision": "fp16", "sizes": _SIZES},
    ),
    Experiment(
        *("tf32-and-fp32", 2, "What does use_tf32=1 give and cost in FP32?"),
        *("faster, with an error above 1e-4; exact without it", convolutions.use_tf32, convolutions.judge_tf32_fp32),
        about_s=45,
        limit_s=180,
        arguments={"precision": "fp32", "sizes": _SIZES},
    ),
    Experiment(
        *("search", 2, "What do cuDNN's searches differ in?"),
        *("within a tenth of each other: neither measures", convolutions.search, convolutions.judge_search),
        about_s=40,
        limit_s=180,
        arguments={"precision": "fp16", "sizes": [32]},
    ),
    Experiment(
        *("benchmark", 3, "Does every engine here meet its targets?", "all that can be measured"),
        *(house.benchmark, house.judge_benchmark),
        about_s=300,
        limit_s=475,
        arguments={"engines": [], "label": "", "http": True},
    ),
    Experiment(
        *("benchmark-onnxruntime", 4, "Does the tree meet its targets with ONNX Runtime, all of its rows measured?"),
        *("all that can be measured", house.benchmark, house.judge_benchmark),
        about_s=150,
        limit_s=270,
        arguments={"engines": [ONNXRUNTIME], "label": "onnxruntime", "http": False},
    ),
    Experiment(
        *("serve", 4, "Does `convoy serve` answer from this GPU under load?"),
        *("from an engine of the GPU, with nobody failed", house.serve, house.judge_serving),
        about_s=110,
        limit_s=200,
    ),
    Experiment(
        *("switch-interval", 4, "Does a switch interval of 0.5 ms instead of 5 ms help the core?"),
        *("not by more than a twentieth", house.switch_interval, house.judge_switch_interval),
        about_s=35,
        limit_s=120,
        arguments={"sizes": [1, 8, 32], "seconds": 0.8, "rounds": 3},
    ),
    *parts_rtx.RTX_EXPERIMENTS,
)
PARTS = tuple(TITLES)


def of_part(part: int) -> tuple[Experiment, ...]:
    """In the order in which they are asked."""
    return tuple(one for one in EXPERIMENTS if one.part == part)
