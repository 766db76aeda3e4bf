"""How long it takes from opening a plan to its first answers, and what the kernels that are kept save of that.

`python -m tests.gpu.proof.experiments.rtx_start FOLDER` is the second process, which has nothing but the files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.proof.experiment import Bench, Judgement, Ran
from tests.gpu.proof.experiments import networks
from tests.gpu.proof.experiments.rtx import Built, Library
from tests.gpu.proof.experiments.rtx_opened import Opened, opened

ROOT = Path(__file__).resolve().parents[4]
_PLAN, _KERNELS, _BATCH = "plan", "kernels", "batch.npy"
# The driver keeps what it compiled, too: then nothing of ours would be seen to help.
_ALONE = {"CUDA_CACHE_DISABLE": "1"}


def start(bench: Bench, sizes: list[int], **network: Any) -> None:
    """Cold, with what that compiled, with what is spoilt and what is another plan's; then in another process."""
    library = Library()
    bench.step("writing the networks")
    networks.resnet_in("fp32", bench.folder, **network)
    model = networks.resnet_in("fp16", bench.folder, **network)
    batch = networks.pictures(max(sizes), network.get("side", 224))
    plan = library.build(model, sizes)
    bench.step("cold")
    kernels = _opened_with(bench, "cold", library, plan, b"", batch)
    bench.step("with its kernels")
    kept = _opened_with(bench, "warm", library, plan, kernels, batch)
    bench.figure("warm: kernels grew by bytes", len(kept) - len(kernels))
    bench.step("with another plan's kernels")
    other = library.build(bench.folder / "fp32.onnx", sizes)
    _opened_with(bench, "another's", library, other, kernels, batch)
    bench.step("in another process")
    (bench.folder / _PLAN).write_bytes(plan.data)
    (bench.folder / _KERNELS).write_bytes(kernels)
    np.save(bench.folder / _BATCH, batch)
    for name, value in _second_process(bench, sizes).items():
        bench.figure(f"second process: {name}", value)
    # Last, because it may be the end of the process.
    bench.step("with spoilt kernels")
    spoilt = kernels[: len(kernels) // 2] + bytes(len(kernels) - len(kernels) // 2)
    with opened(library, plan, kernels=spoilt) as one:
        bench.figure("spoilt kernels are taken", one.takes_kernels)
    bench.fact("spoilt kernels: it says", library.said())


def _opened_with(bench: Bench, how: str, library: Library, plan: Built, kernels: bytes, batch: np.ndarray) -> bytes:
    """What is known when every size has answered once."""
    for name, value in (found := _measure(library, plan, kernels, batch))[0].items():
        bench.figure(f"{how}: {name}", value)
    return found[1]


def _measure(library: Library, plan: Built, kernels: bytes, batch: np.ndarray) -> tuple[dict[str, float], bytes]:
    began_s = time.perf_counter()
    one = Opened(library, plan, kernels=kernels)
    try:
        for size in plan.sizes:
            one.bind(batch[:size])
            one.took[f"first batch {size}"] = one.run_ms(size) / 1e3
        whole_s = time.perf_counter() - began_s
        known = one.kernels()
    finally:
        one.close()
    figures = {f"{name} s": seconds for name, seconds in one.took.items()}
    figures |= {"whole s": whole_s, "kernels are taken": float(one.takes_kernels), "kernels MB": len(known) / 1e6}
    return figures, known


def _second_process(bench: Bench, sizes: list[int]) -> dict[str, float]:
    command = [sys.executable, "-m", __name__, str(bench.folder), json.dumps(sizes)]
    said = subprocess.run(
        command, cwd=ROOT, env=os.environ | _ALONE, capture_output=True, text=True, timeout=max(1.0, bench.left_s)
    )
    if said.returncode:
        bench.fact("second process: refused", said.stderr.strip().splitlines()[-1] if said.stderr.strip() else "silent")
        return {}
    found: dict[str, float] = json.loads(said.stdout.splitlines()[-1])
    return found


def judge_start(ran: Ran) -> Judgement:
    """What was kept saves at least half of the time, here and in another process, and nothing spoilt is taken."""
    cold, warm, second = (ran.figures[f"{how}: whole s"] for how in ("cold", "warm", "second process"))
    compiled_anew = ran.figures["second process: kernels grew by bytes"] > 0
    told = (
        f"{cold:.2f} s cold, {warm:.2f} s with {ran.figures['cold: kernels MB']:.1f} MB of kernels, {second:.2f} s in "
        f"another process, which {'compiled something' if compiled_anew else 'compiled nothing'}; spoilt kernels are "
        f"{'taken' if ran.figures['spoilt kernels are taken'] else 'refused'}"
    )
    is_expected = max(warm, second) < cold / 2 and not compiled_anew and not ran.figures["spoilt kernels are taken"]
    return Judgement.of(is_expected, told)


def main(arguments: list[str]) -> int:
    """Prints the figures as one line of JSON."""
    folder, sizes = Path(arguments[0]), tuple(json.loads(arguments[1]))
    kernels = (folder / _KERNELS).read_bytes()
    plan = Built((folder / _PLAN).read_bytes(), sizes, "range", 0.0)
    figures, known = _measure(Library(), plan, kernels, np.load(folder / _BATCH))
    print(json.dumps(figures | {"kernels grew by bytes": float(len(known) - len(kernels))}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
