"""Whether there are spans, and what makes them: the only module that imports the tracing library."""

from __future__ import annotations

from importlib.util import find_spec

from convoy.app.telemetry.tracing import Tracing
from convoy.models.checkout import pip_install
from convoy.models.errors import UsageError


def check_tracing() -> None:
    """Raise UsageError if spans are wanted and the library is not installed."""
    try:
        is_there = find_spec("opentelemetry.sdk") and find_spec("opentelemetry.exporter.otlp.proto")
    except ModuleNotFoundError:
        is_there = None
    if not is_there:
        raise UsageError(f"--tracing needs OpenTelemetry's SDK; {pip_install('otel')}")


def start_tracing(*, is_wanted: bool) -> Tracing | None:
    """What makes this process's spans; None if tracing is off. Raises UsageError."""
    if not is_wanted:
        return None
    check_tracing()
    from convoy.app.telemetry import otel as sdk

    return sdk.start()
