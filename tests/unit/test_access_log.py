"""The line of the access log: what others' handlers are given beside it, and what our text does not ask for."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from convoy.app.calls.access import AccessLog, CallFacts
from convoy.app.calls.options import BodyLimits, ServeOptions
from convoy.app.server import logs

TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """Ours, which is left as it was."""
    ours = logging.getLogger("convoy")
    before = ours.handlers[:], ours.propagate, ours.level
    yield ours
    ours.handlers[:], ours.propagate, level = before
    ours.setLevel(level)


def write(asked: list[str]) -> None:
    def facts() -> CallFacts:
        asked.append("facts")
        return CallFacts("digits", 2, "late", "", {"queue": 1.5})

    AccessLog(ServeOptions(BodyLimits(1 << 20), decode_threads=1)).log(
        *("10.0.0.1", "POST /predictions/digits", "504", 12.25),
        is_error=True,
        trace=TRACE,
        key_name="ward-3",
        facts=facts,
    )


def test_a_handler_of_somebody_elses_is_given_the_fields(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []
    with caplog.at_level(logging.INFO, "convoy"):
        write(asked)
    (record,) = caplog.records
    given = vars(record)
    assert given["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    names = ("client", "call", "status", "took_ms", "key", "model", "version", "outcome", "stages_ms")
    assert [given[name] for name in names] == [
        *("10.0.0.1", "POST /predictions/digits", "504", 12.25, "ward-3", "digits", 2, "late", {"queue": 1.5})
    ]
    assert "reason" not in given
    assert asked == ["facts"]


@pytest.mark.parametrize(("form", "asks"), [("text", []), ("json", ["facts"])])
def test_what_nobody_reads_is_not_asked_for(
    form: logs.LogFormat, asks: list[str], logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure_own("info", form)
    asked: list[str] = []
    write(asked)
    line = capsys.readouterr().err
    assert asked == asks
    assert f"10.0.0.1 POST /predictions/digits 504 12.2 ms key ward-3 trace {TRACE.decode()}" in line
    assert ('"stages_ms":{"queue":1.5}' in line) == (form == "json")
