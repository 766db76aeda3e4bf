"""`python -m tests.gpu.proof --out DIR`: prove Convoy on this machine's GPU, within one budget of time.

Runs the steps in the order of their value, each in a process of its own with a limit. After each finding
`DIR/results.jsonl` has one more line, so that nothing is lost when a step hangs or the machine goes away. Needs a
checkout, torch, onnx, numpy and pytest; what else is missing comes from the folders of `--carried` (see `pack.py`).
Imports the standard library only: this file must start anywhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
import venv
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]
RESULTS, LOG = "results.jsonl", "log.txt"
# To stop a step, and to write what is left.
_ENDING_S = 5.0
# What a GPU machine of the kind that this is made for has: torch for CUDA, ONNX Runtime for CPUs, and common tools. The
# dry run sees nothing else; what Convoy needs beyond it has to be carried.
PRESENT = (
    *("numpy", "torch", "torchgen", "functorch", "triton", "nvidia", "sympy", "mpmath", "networkx", "jinja2"),
    *("markupsafe", "filelock", "fsspec", "typing_extensions", "setuptools", "_distutils_hack", "onnx", "ml_dtypes"),
    *("onnxruntime", "flatbuffers", "google", "coloredlogs", "humanfriendly", "pytest", "_pytest", "py", "pluggy"),
    *("iniconfig", "packaging", "pygments", "PIL", "pillow", "safetensors", "scipy", "typer", "click", "shellingham"),
    *("rich", "markdown_it", "mdurl", "prometheus_client", "anyio", "sniffio", "idna", "h11", "uvloop", "psutil"),
    *("annotated_doc", "cuda", "pynvml", "grpc", "yaml", "websockets", "cuda_bindings", "grpcio", "pyyaml"),
)
# What stands for the carried wheels in a dry run, by the names under which they are imported.
CARRIED = (
    *("fastapi", "starlette", "uvicorn", "httptools", "msgspec", "orjson", "pydantic", "pydantic_core"),
    *("pydantic_settings", "python_multipart", "multipart", "simdjson", "csimdjson", "simplejpeg", "annotated_types"),
    *("typing_inspection", "dotenv", "python_dotenv", "fastapi_offline", "pythonjsonlogger", "python_json_logger"),
    *("pysimdjson", "opentelemetry", "opentelemetry_api"),
)


class Step(NamedTuple):
    """A function of `steps`, and the most that it may take."""

    function: str
    limit_s: float


VISITS = {
    1: (
        Step("machine", 30),
        Step("gpu_tests", 60),
        Step("serve", 110),
        Step("replay", 40),
        Step("convolutions", 70),
        Step("captures", 30),
        Step("resnet50", 150),
    ),
    2: (Step("rtx_answers", 220),),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.proof", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder for results.jsonl and log.txt")
    parser.add_argument("--limit-s", type=float, default=540.0, help="one budget for all steps, in seconds [540]")
    parser.add_argument("--carried", type=Path, nargs="+", default=[], help="folders of wheels and packed libraries")
    parser.add_argument("--visit", type=int, choices=sorted(VISITS), default=1, help="2: TensorRT for RTX [1]")
    parser.add_argument("--only", nargs="+", default=[], help="run these steps only")
    parser.add_argument("--dry-run", action="store_true", help="start every step without a GPU, against fakes")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.step:
        return _run_here(options.step, options.out, options.limit_s, options.dry_run)
    steps = VISITS[options.visit] if not options.dry_run else tuple(one for steps in VISITS.values() for one in steps)
    known = {one.function for one in steps}
    if unknown := [name for name in options.only if name not in known]:
        parser.error(f"no step is called {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    steps = tuple(one for one in steps if not options.only or one.function in options.only)
    with tempfile.TemporaryDirectory(prefix="convoy-proof-") as folder:
        python, env = _environment(Path(folder), options.carried, options.dry_run)
        return _run_all(steps, options, python, env)


def _run_all(steps: tuple[Step, ...], options: argparse.Namespace, python: str, env: dict[str, str]) -> int:
    end_s = time.monotonic() + options.limit_s
    for step in steps:
        limit_s = min(step.limit_s, end_s - time.monotonic() - _ENDING_S)
        if limit_s < min(10.0, step.limit_s / 2):
            _record(options.out, step.function, {"check": "time", "found": "no time is left", "verdict": "not run"})
            continue
        _run_apart(step, limit_s, options, python, env)
    lines = _lines(options.out)
    failed = sum(line["verdict"] == "fail" for line in lines)
    passed = sum(line["verdict"] == "pass" for line in lines)
    print(f"{passed} passed, {failed} failed, {len(lines)} lines in {options.out / RESULTS}")
    return 1 if failed or not passed else 0


def _run_apart(step: Step, limit_s: float, options: argparse.Namespace, python: str, env: dict[str, str]) -> None:
    command = [python, "-m", "tests.gpu.proof", "--step", step.function, "--out", str(options.out.resolve())]
    command += ["--limit-s", f"{limit_s:.0f}", *(["--dry-run"] if options.dry_run else [])]
    began_s, known = time.monotonic(), len(_lines(options.out))
    with (options.out / LOG).open("ab") as log:
        log.write(f"\n=== {step.function}\n".encode())
        log.flush()
        child = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            code = child.wait(timeout=limit_s)
            problem = f"ended with exit code {code}; {LOG} says more" if code else ""
        except subprocess.TimeoutExpired:
            problem = f"did not end within {limit_s:.0f} s"
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # and what it has left running
        child.wait()
    for line in _lines(options.out)[known:]:
        _show(line)
    if problem:
        _record(options.out, step.function, {"check": "end", "expected": "", "found": problem, "verdict": "fail"})
    took = f"{time.monotonic() - began_s:.0f} s of {limit_s:.0f}"
    _record(options.out, step.function, {"check": "took", "expected": "", "found": took, "verdict": "measured"})


def _record(out: Path, step: str, line: dict[str, Any]) -> None:
    line = {"step": step, "expected": "", **line}
    with (out / RESULTS).open("a") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())
    _show(line)


def _show(line: dict[str, Any]) -> None:
    print(f"{line['verdict']:>14}  {line['step']}: {line['check']}: {line['found']}", flush=True)


def _lines(out: Path) -> list[dict[str, Any]]:
    file = out / RESULTS
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _run_here(step: str, out: Path, limit_s: float, is_dry: bool) -> int:
    from tests.gpu.proof import steps

    with tempfile.TemporaryDirectory(prefix=f"convoy-proof-{step}-") as folder:
        report = steps.Report(partial(_record, out, step), Path(folder), limit_s, is_dry)
        try:
            getattr(steps, step)(report)
        except steps.NotMeasurable as reason:
            _record(out, step, {"check": step, "found": str(reason), "verdict": "not measurable"})
        except Exception as error:  # any library's
            traceback.print_exc()
            found = f"{type(error).__name__}: {str(error)[:1000]}"
            _record(out, step, {"check": step, "expected": "to end", "found": found, "verdict": "fail"})
    return 0


def _environment(folder: Path, carried: list[Path], is_dry: bool) -> tuple[str, dict[str, str]]:
    """The Python for the steps and its environment. `folder` takes what is unpacked."""
    site = folder / "site"
    site.mkdir()
    python = sys.executable
    if is_dry:
        python = _bare_python(folder / "venv")
        _link(CARRIED, site)
    else:
        unpack(carried, site)
    libraries = [*_cuda_libraries(site), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    paths = [str(ROOT), str(site), *([] if is_dry else filter(None, [os.environ.get("PYTHONPATH")]))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "LD_LIBRARY_PATH": os.pathsep.join(libraries)}
    return python, env | {"PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": str(folder / "cache")}


def unpack(carried: list[Path], site: Path) -> None:
    """Unpack wheels and .tar.xz files; what was cut in pieces is joined. Exits where a piece is missing."""
    files = [file for folder in carried for file in sorted(folder.rglob("*")) if file.is_file()]
    if carried and not files:
        raise SystemExit(f"--carried: nothing is in {', '.join(map(str, carried))}")
    pieces: dict[str, dict[int, Path]] = {}
    for file in files:
        if piece := re.fullmatch(r"(.+)\.(\d)of2", file.name):
            pieces.setdefault(piece[1], {})[int(piece[2])] = file
    for name, found in pieces.items():
        if sorted(found) != [1, 2]:
            raise SystemExit(f"--carried: {name}: only piece {sorted(found)} of 2 is there; name both folders")
        whole = site.parent / name
        whole.write_bytes(found[1].read_bytes() + found[2].read_bytes())
        files.append(whole)
    for file in files:
        if file.suffix == ".whl":
            with zipfile.ZipFile(file) as wheel:
                wheel.extractall(site)
        elif file.name.endswith(".tar.xz"):
            with tarfile.open(file) as tar:
                tar.extractall(site, filter="data")


def _cuda_libraries(site: Path) -> Iterator[str]:
    """CUDA and cuDNN as pip has put them, with torch for instance."""
    spec = importlib.util.find_spec("nvidia")
    roots = [site / "nvidia", *(Path(one) for one in (spec.submodule_search_locations or ()) if spec)] if spec else []
    for root in roots:
        yield from sorted(str(one) for one in root.glob("*/lib") if one.is_dir())


def _bare_python(folder: Path) -> str:
    """A virtual environment with the packages of PRESENT and nothing else."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    _link(PRESENT, site)
    return str(folder / "bin" / "python")


def _link(names: tuple[str, ...], site: Path) -> None:
    wanted = {name.lower() for name in names}
    for place in {Path(one) for one in sys.path if one.endswith("site-packages")}:
        for found in place.iterdir():
            name = re.split(r"[-.]", found.name.lower())[0]
            if name in wanted and not (site / found.name).exists():
                (site / found.name).symlink_to(found.resolve())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
