"""Opens every ONNX Runtime session of Convoy, without the optimisations that ONNX Runtime gets wrong.

Callers choose threads and providers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort

# The names under which ONNX Runtime registers them; it ignores unknown names.
WRONG_OPTIMIZERS = ("Pad_Fusion",)
# Severities of ONNX Runtime's log.
_WARNING, _FATAL = 2, 4
_LOG = logging.getLogger("convoy")
_CPU = ("CPUExecutionProvider",)

Level = ort.GraphOptimizationLevel


def session_options(runtime: Any = ort, *, threads: int | None = None, level: Any = None) -> Any:
    """Options for a session with `threads` threads that computes what the graph means.

    `runtime` is the onnxruntime module. `threads` None leaves the number to the library. `level` is one
    of `Level`; None enables all optimisations.
    """
    options = runtime.SessionOptions()
    options.add_session_config_entry("optimization.disable_specified_optimizers", ";".join(WRONG_OPTIMIZERS))
    # Idle cores belong to the server and to other models.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # ONNX Runtime writes to stderr past Python's logging, and raises what fails as well.
    severity = _WARNING if _LOG.isEnabledFor(logging.DEBUG) else _FATAL
    ort.set_default_logger_severity(severity)
    options.log_severity_level = severity
    if threads is not None:
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
    if level is not None:
        options.graph_optimization_level = level
    return options


def new_session(
    model: Path | bytes,
    options: Any | None = None,
    *,
    runtime: Any = ort,
    providers: Sequence[Any] = _CPU,
    **library_options: Any,
) -> Any:
    """A session for a file or a serialised graph. `options` come from `session_options`; None means its defaults.

    Raises what ONNX Runtime raises, whose errors share no base class.
    """
    given = model if isinstance(model, bytes) else str(model)
    own = session_options(runtime) if options is None else options
    return runtime.InferenceSession(given, own, providers=list(providers), **library_options)


def unoptimised_session(model: Path | bytes, threads: int | None = None) -> Any:
    """A CPU session that runs the graph node by node as written, as the reference for optimised ones."""
    return new_session(model, session_options(threads=threads, level=Level.ORT_DISABLE_ALL))
