"""`python -m convoy.export.engine_table [PAGE [MODEL...]]`: measures anew and writes PAGE, else `docs/engines.md`."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from convoy.app.engines.cpu import cpu_budget, cpu_model, has_bf16, has_int8_dot_product
from convoy.export.engine_table.page import render
from convoy.export.engine_table.race import EngineResult, race
from convoy.models.checkpoint import write_whole

# Small and large, plain and depthwise convolutions, and one without any.
_MODELS = (
    *("resnet18", "resnet50", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0"),
    *("densenet121", "shufflenet_v2_x1_0", "squeezenet1_1", "regnet_y_400mf", "vit_b_16"),
)


def main(arguments: Sequence[str]) -> None:
    page, names = Path(arguments[0] if arguments else "docs/engines.md"), arguments[1:] or _MODELS
    int8 = "8-bit dot products" if has_int8_dot_product() else "no 8-bit dot products"
    bf16 = "BF16" if has_bf16() else "no BF16, so that there is no such variant"
    machine = f"{cpu_model()}, {cpu_budget()} cores, {platform.system()} {platform.machine()}; {int8}, {bf16}"
    entries: list[EngineResult] = []
    for name in names:
        entries += race(name, cpu_budget())
        write_whole(page, render(machine, entries).encode())
        print(f"{name}: {len(entries)} lines", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
