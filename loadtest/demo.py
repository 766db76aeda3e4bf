"""The whole way once: train, export, serve, predict, load; ends by itself and prints one table.

Runs the same commands that a user would type, in a temporary folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from convoy.loadtest.startup import serving

_PORT = 18_300
_URL = f"http://127.0.0.1:{_PORT}"
_IMAGES = Path(__file__).parent / "data"


def main() -> None:
    console = Console()
    table = Table("step", "seconds", "result")
    with tempfile.TemporaryDirectory(prefix="convoy-demo-") as temporary:
        folder = Path(temporary)
        weights, store, report = folder / "digits.safetensors", folder / "store", folder / "load.json"
        store.mkdir()
        train_s = _convoy("train digits --arch simple_cnn --out", weights)
        table.add_row("train", f"{train_s:.1f}", "the classic CIFAR CNN, on real handwritten digits")
        export_s = _convoy(
            "export zoo:simple_cnn --name digits --calibrate digits --evaluate digits --weights",
            weights,
            "--store",
            store,
        )
        table.add_row("export", f"{export_s:.1f}", _variants(store))
        with serving(_PORT, "--store", str(store), "--access-log", "off") as (_, ready_s):
            table.add_row("serve", f"{ready_s:.2f}", "from start to ready")
            images = sorted(_IMAGES.glob("*.png"))[:5]
            predict_s = _convoy("predict digits --top-k 1 --url", _URL, *images)
            table.add_row("predict", f"{predict_s:.1f}", f"{len(images)} images")
            load_s = _convoy("loadtest --model digits --duration 5 --url", _URL, "--json", report)
            table.add_row("load test", f"{load_s:.1f}", _load(report))
    console.print(table)


def _convoy(command: str, *arguments: object) -> float:
    """Run one command as a user would; the seconds it took. Ends the demo when it fails."""
    started_s = time.perf_counter()
    words = [*command.split(), *(str(argument) for argument in arguments)]
    print(f"$ convoy {' '.join(words)}", flush=True)
    outcome = subprocess.run([sys.executable, "-m", "convoy", *words])
    if outcome.returncode != 0:
        raise SystemExit(f"the demo stops: `convoy {words[0]}` ended with exit code {outcome.returncode}")
    return time.perf_counter() - started_s


def _variants(store: Path) -> str:
    manifest = json.loads((store / "digits" / "1" / "manifest.json").read_text())
    return ", ".join(
        f"{variant['precision']} {100 * variant['accuracy']['top1']:.2f} %{'' if variant['serve'] else ' (not served)'}"
        for variant in manifest["variants"]
    )


def _load(report: Path) -> str:
    measured = json.loads(report.read_text())
    rate = measured["good"] / measured["window_s"]
    return f"{rate:,.0f} images a second over HTTP, {measured['failed']} failed"


if __name__ == "__main__":
    main()
