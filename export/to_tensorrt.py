"""`python -m convoy.export.to_tensorrt ONNX --plan-cache DIR --precision P --batch-sizes 1,2,4`: build a plan into the
cache.

`convoy build`, the export and the server start it as a child process, with a memory and a time limit, because a build
may take minutes and may crash. With `--json-progress`, every line on stdout is a `convoy.models.plans.BuildEvent`, the
last one `done` or `failed`. Exit codes: 0 the plan exists, 1 the build failed, 2 wrong usage, 3 TensorRT does not
accept the file.

Needs a TensorRT, numpy and `models`, but no terminal, onnx or torch; TensorRT for RTX also needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, cast, get_args

from convoy.app.engines.tensorrt_library import RTX, TensorRt, library_named, load_builder
from convoy.export.tensorrt.build import BuildJob, build_plan
from convoy.export.tensorrt.library import find_gpu, resolve_target
from convoy.export.tensorrt.watch import BuildWatch
from convoy.models.bundle import Precision
from convoy.models.errors import ConvoyError, JobError, UsageError
from convoy.models.gpus import PORTABLE, parse_targets
from convoy.models.plans import BuildEvent, BuildOptions, Gpu, HardwareCompatibility, LibraryName, Plan
from convoy.models.records import to_jsonable


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see python -m convoy.export.to_tensorrt --help")


# BF16 is for processors.
_PRECISIONS = tuple(precision for precision in get_args(Precision) if precision != "bf16")


def main(
    arguments: Sequence[str] | None = None,
    load: Callable[[TensorRt], Any] = load_builder,
    device: Callable[[], Gpu] = find_gpu,
) -> int:
    """Run the command and return its exit code; tests replace `load` and `device`."""
    watch = BuildWatch(lambda event: None)
    is_json = "--json-progress" in (sys.argv if arguments is None else arguments)
    try:
        given = _arguments(arguments)
        watch = BuildWatch(_tell_json if is_json else _tell_people, given.time_limit_s)
        library = library_named(cast(LibraryName, given.library))
        trt = load(library)
        plan = build_plan(_job(given, library, trt, device), trt, watch)
        _tell_done(plan, watch, is_json)
    except (ConvoyError, OSError, MemoryError) as error:
        return _tell_failed(error, watch, is_json)
    return 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m convoy.export.to_tensorrt", description="Build a TensorRT plan into the plan cache."
    )
    parser.add_argument("onnx", type=Path, help="the model; its external data lies beside it")
    parser.add_argument("--plan-cache", type=Path, required=True, help="folder of plans")
    parser.add_argument("--library", choices=get_args(LibraryName), default=RTX.name)
    parser.add_argument("--for", dest="targets", type=_targets, default=(), help=f"such as sm80,l4, or {PORTABLE}")
    parser.add_argument("--precision", required=True, choices=_PRECISIONS, help="what the graph is typed as")
    parser.add_argument("--batch-sizes", type=_sizes, required=True, help="such as 1,2,4,8")
    parser.add_argument("--workspace-mb", type=int, help="MiB of scratch memory a kernel may use (default: all)")
    parser.add_argument(
        "--beside-mb",
        type=int,
        help="a server uses the GPU: take at most this many MiB, and keep timings out of the shared cache",
    )
    parser.add_argument("--time-limit-s", type=_seconds, help="seconds after which to give up (default: never)")
    parser.add_argument("--timing-cache", type=Path, help="file of kernel times (default: one in the plan cache)")
    parser.add_argument("--hardware-compatibility", choices=get_args(HardwareCompatibility), default="none")
    parser.add_argument("--json-progress", action="store_true", help="one JSON object a line on stdout")
    return parser.parse_args(arguments)


def _job(given: argparse.Namespace, library: TensorRt, trt: Any, device: Callable[[], Gpu]) -> BuildJob:
    gpu = None if library.builds_anywhere else device()
    compatibility = given.hardware_compatibility
    options = BuildOptions(given.precision, given.batch_sizes, given.workspace_mb, compatibility, library.profiles)
    target = resolve_target(library, trt, given.targets, options, gpu)
    return BuildJob(
        *(given.onnx, given.plan_cache, options, target, gpu.name if gpu else "", given.timing_cache),
        beside_mb=given.beside_mb,
    )


def _targets(text: str) -> tuple[str, ...]:
    try:
        return parse_targets(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of batch sizes such as 1,2,4,8") from error


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    # Not "<= 0", which would let NaN pass.
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _tell_json(event: BuildEvent) -> None:
    print(json.dumps(to_jsonable(event)), flush=True)


def _tell_people(event: BuildEvent) -> None:
    # There are hundreds of nested phases; people see the outermost.
    if event.kind == "note":
        print(f"{event.elapsed_s:7.1f} s  {event.text}", flush=True)
    elif event.kind == "progress" and event.parent is None and event.step == 0:
        print(f"{event.elapsed_s:7.1f} s  {event.text} ({event.total} steps)", flush=True)


def _tell_done(plan: Plan, watch: BuildWatch, is_json: bool) -> None:
    if is_json:
        return _tell_json(BuildEvent("done", str(plan.path), watch.elapsed_s))
    audit = plan.record.audit
    counts = audit.by_precision.items() if audit is not None else ()
    layers = ", ".join(f"{count} {precision}" for precision, count in counts) or "not told"
    return print(f"{plan.path} ({len(plan.data) / 1e6:.1f} MB; computing layers: {layers})")


def _tell_failed(error: BaseException, watch: BuildWatch, is_json: bool) -> int:
    if isinstance(error, MemoryError):
        error = JobError("not enough memory to build this plan; use a larger machine or fewer batch sizes")
    elif isinstance(error, OSError):
        error = JobError(f"{error.filename or 'the plan cache'}: {error.strerror}; check the disk and the folder")
    print(f"to_tensorrt: {error}", file=sys.stderr)
    if is_json:
        with suppress(OSError):
            _tell_json(BuildEvent("failed", str(error), watch.elapsed_s))
    _let_go_of_stdout()
    return error.exit_code if isinstance(error, ConvoyError) else 1


def _let_go_of_stdout() -> None:
    # If the reader is gone, Python would fail again during shutdown and change the exit code.
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    # A build is in C++ for minutes, where Python's own handler would not run. The default ends it at once; the lock
    # goes with the process, and no half-written file has a plan's name.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())
