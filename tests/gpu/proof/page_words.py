"""What the page says whatever was found: how it is made, what can be carried, how its figures are read."""

from __future__ import annotations

from tests.gpu.proof.targets import TORCH

INTRODUCTION = """# What was proved on a GPU

Written by `make gpu-proof`, which runs on any machine with an NVIDIA driver and a plain checkout, in parts of at most
eight minutes:

| | |
|---|---|
| `make gpu-proof` | all parts in their order, as far as they were not answered before |
| `make gpu-proof PART=2` | one part; each is useful alone |
| `FRESH=1` | asks again what was answered before |
| `ONLY=NAME` | one experiment |
| `CARRY=DIR` | unpacks wheels and packed libraries from `DIR`, and from folders inside it, and uses them |
| `OUT=DIR` | writes there instead of `docs/` |

Each experiment asks one question in a process of its own, with a limit: a kernel that breaks the device, a library that
ends the process or a call that never returns costs that experiment only. What it found is in
`results/<gpu>-experiments.json` when it ends, so that the next call, on the same machine or on another one of its kind,
goes on where this one stopped; what does not fit into a part's time is left for that call. *Otherwise* means that the
guess in the column *expected* was wrong, or that the process ended in a way that it should not; *not measurable here*
means that something is missing, and *not answered yet* that the part's time was over first: both are asked again each
time. `--page` writes this page again from the results.

## On a machine without a network

What a machine lacks can be carried in a folder. ONNX Runtime's GPU wheel is too large for most ways to carry it, so it
is made smaller: the machine code of other GPUs is taken out, and what is left is packed. With the wheel for that
machine's Python, and the compute capability of its GPU (9.0 for H100 and H200); the result has been loaded, but has not
run on a GPU yet:

```bash
pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 -d wheels \\
    onnxruntime-gpu
python -m tests.gpu.proof.pack wheels/onnxruntime_gpu-*.whl 9.0 carried       # some 60 MB
pip download --no-deps ... -d carried fastapi uvicorn ...                     # whatever else is missing there
make gpu-proof CARRY=carried PART=0                                           # on that machine
```

Where there is no make, `python -m tests.gpu.proof --carry carried --part 0` is the same. All that has to be brought
back is this page and a few small files in `results/`.

TensorRT for RTX is a package that pip makes a wheel of, a wheel for that machine's Python, and one of libraries, which
brings all that it needs but the driver. Part 5 asks about it, part 6 holds it against what else is there. Nothing can
be left out of its libraries, so that they are cut in two, each in a folder of its own that can be carried by itself:

```bash
pip wheel --no-deps -w carried/small tensorrt-rtx-cu13==1.7.1.116              # 23 kB, the same for every Python
pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 -d wheels \\
    tensorrt-rtx-cu13-bindings==1.7.1.116 tensorrt-rtx-cu13-libs==1.7.1.116
mv wheels/tensorrt_rtx_cu13_bindings-*.whl carried/small                       # 1.2 MB
python -m tests.gpu.proof.pack wheels/tensorrt_rtx_cu13_libs-*.whl all carried --pieces 2     # 2 x 32 MB
make gpu-proof CARRY=carried PART=5                                            # with carried/1of2, 2of2 and small
```

Part 0 says what is there, and whether the provider loads. CUDA and cuDNN are taken from where pip has put them, with
torch for instance (`nvidia/*/lib`), by way of `LD_LIBRARY_PATH`; they need not be carried where torch for CUDA is
installed.
"""
BENCHMARK = f"""## How to read the benchmark

It runs the tests marked `gpu` unless part 1 has, then measures. It takes what it finds: what is missing (TensorRT, ONNX
Runtime's CUDA provider, the HTTP server's libraries) drops its rows, and the reason stands below.

Every ratio is of two figures of one run. *Bare*: the engine alone, fed from page-locked memory by one thread per slot.
*Core*: the same engine behind slab, queue, batcher and lane, without HTTP; its requests' bytes lie in the slab already.
*Hidden*: (T1 - T2) / (T1 - C), where T1 and T2 are the wall times per batch with one slot and with two, and C the time
in which it computes. *{TORCH}* is a vehicle of this proof and no engine that serves: a torch network
on the streams and buffers that TensorRT and ONNX Runtime use, which shows what those do where neither library is
there. ONNX Runtime's rows are with cuDNN's heuristic search; a server also tries the exhaustive one, once per model.
ResNet-50 and MobileNetV2 have random weights with measured BatchNorm statistics, the digits CNN is the trained demo.
"""
