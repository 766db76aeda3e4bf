"""What TensorRT for RTX makes of one ONNX file, without a GPU: `build` asks a child process, which may crash.

    python -m export.zoo_builder ONNX PRECISION ANSWER    the child; ANSWER becomes a `BuilderCell`

Knows the builder and what a process may do to a machine. Knows nothing of networks or of the table.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from export.sources.torch_job import one_line
from export.tensorrt.audit import read_audit
from export.tensorrt.engine import tune
from export.tensorrt.watch import BuildWatch
from export.zoo_rows import BuilderCell, installed
from models.bundle import Precision
from models.errors import ConvoyError, JobError
from models.plans import BuildOptions, PlanAudit
from models.records import from_jsonable, to_jsonable

_MODULE = "tensorrt_rtx"
_LIBRARY, _DISTRIBUTION = "TensorRT for RTX", "tensorrt-rtx"
_BATCHES = (1, 8)
_LIMIT_S, _GRACE_S = 600.0, 60.0
_MOST_BYTES = 10 << 30
_WHY_CHARACTERS = 600
_ROOT = Path(__file__).resolve().parents[1]
_LAYER = re.compile(r"Name: .*?, LayerType: (\w*), Inputs: (.*), Constants: .*?, Outputs: (.*), TacticName: ")
# What the library's own layers are called that compute nothing, beside those that the audit knows.
_SHAPES_ONLY = "shape_call"


@dataclass(slots=True)
class _Heard:
    """What the builder says beside its errors."""

    warnings: dict[str, None] = field(default_factory=dict)
    layers: str = ""


def library() -> str:
    """The builder's name and version; empty where it is not installed."""
    version = installed(_DISTRIBUTION)
    return f"{_LIBRARY} {version}" if version else ""


def build(onnx: Path, precision: Precision, limit_s: float = _LIMIT_S + _GRACE_S) -> BuilderCell:
    """Have a child build `onnx`; never raises for what becomes of it. The answer and the log lie beside `onnx`."""
    answer, log = onnx.with_suffix(".answer"), onnx.with_suffix(".log")
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", "-m", "export.zoo_builder", str(onnx), precision, str(answer)]
    with log.open("wb") as stream:
        try:
            status = subprocess.run(
                command, timeout=limit_s, stdout=stream, stderr=stream, env={**os.environ, "PYTHONPATH": path}
            ).returncode
        except subprocess.TimeoutExpired:
            return BuilderCell(precision, accepted=False, why=f"the builder did not end within {limit_s:g} s")
    if answer.exists():
        return from_jsonable(BuilderCell, json.loads(answer.read_text()), answer.name)
    return BuilderCell(precision, accepted=False, why=_obituary(status, log))


def _obituary(status: int, log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    last = f": {one_line(lines[-1])}" if lines else ""
    how = signal.Signals(-status).name if status < 0 else f"exit code {status}"
    return f"the builder's process died of {how}{last}"


def limit_memory(nbytes: int) -> None:
    """Let this process and its children have so much each, and fail where they want more."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (nbytes if hard == resource.RLIM_INFINITY else min(nbytes, hard), hard))


def main(onnx: Path, precision: Precision, answer: Path) -> None:
    """The child: build under a limit of memory, and write the answer as the last thing."""
    limit_memory(_MOST_BYTES)
    cell = _tried(onnx, precision)
    answer.write_text(json.dumps(to_jsonable(cell)))


def _tried(onnx: Path, precision: Precision) -> BuilderCell:
    trt: Any = importlib.import_module(_MODULE)
    heard = _Heard()
    start_s = time.monotonic()
    try:
        nbytes, why = _plan_bytes(_listening(trt, heard), onnx, precision), ""
    except (ConvoyError, MemoryError) as error:
        nbytes, why = 0, str(error) or f"more than {_MOST_BYTES >> 30} GiB of memory are needed"
    return BuilderCell(
        precision,
        accepted=nbytes > 0,
        megabytes=round(nbytes / 1e6, 1) if nbytes else None,
        seconds=round(time.monotonic() - start_s, 2),
        peak_mb=_peak_mb(),
        layers=_audit(heard.layers) if heard.layers else None,
        warnings=tuple(heard.warnings),
        why=one_line(why.replace(str(onnx), onnx.name), _WHY_CHARACTERS),
    )


def _peak_mb() -> int | None:
    """The most memory that this process has had. Not getrusage's, which counts the parent's before the exec."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) >> 10 if found else None


def _plan_bytes(trt: Any, onnx: Path, precision: Precision) -> int:
    """The finished plan's size. All that is known here of Convoy's builder. Raises JobError where there is none."""
    watch = BuildWatch(lambda event: None, _LIMIT_S)
    tuned = tune(trt, onnx, BuildOptions(precision, _BATCHES), b"", watch)
    if tuned.data is None:
        watch.check()
        raise JobError(tuned.problem)
    return len(tuned.data)


def _listening(trt: Any, heard: _Heard) -> Any:
    """`trt`, but what its builder says is heard here, too."""

    class Relay(trt.ILogger):  # type: ignore[misc]
        def __init__(self, listener: Any) -> None:
            trt.ILogger.__init__(self)
            self.listener = listener

        def log(self, severity: Any, msg: str) -> None:
            if severity == trt.ILogger.WARNING:
                heard.warnings[one_line(msg)] = None
            elif msg.startswith("Layers:"):
                heard.layers = msg
            self.listener.log(severity, msg)

    class Listening:
        def __getattr__(self, name: str) -> Any:
            return getattr(trt, name)

        def Builder(self, logger: Any) -> Any:  # noqa: N802
            self.relay = Relay(logger)  # which the builder does not hold
            return trt.Builder(self.relay)

    return Listening()


def _audit(text: str) -> PlanAudit:
    """The layers in the builder's list of them, which has the words of the inspector's JSON but not its form."""
    found = [match.groups() for line in text.splitlines() if (match := _LAYER.match(line))]
    layers = [
        {"LayerType": kind, "Inputs": _tensors(inputs), "Outputs": _tensors(outputs)}
        for kind, inputs, outputs in found
        if kind != _SHAPES_ONLY
    ]
    return read_audit(json.dumps({"Layers": layers}))


def _tensors(text: str) -> list[dict[str, str]]:
    return [{"Datatype": name} for name in re.findall(r"Datatype: (\w+)", text)]


if __name__ == "__main__":
    main(Path(sys.argv[1]), cast(Precision, sys.argv[2]), Path(sys.argv[3]))
