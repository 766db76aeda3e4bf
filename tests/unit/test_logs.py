"""Log lines by a thread: in order, never waited for, and what is dropped is told; and the access log's own."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from convoy.app.calls.access import AccessLog, ApiKey, BodyLimits, ServeOptions
from convoy.app.server import logs
from convoy.app.server.http_server import announce
from convoy.app.server.logs import LogWriter
from tests.support.stores import ROOT

# What a pipe holds at least.
PIPE_BYTES = 4096


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    for descriptor in (reading, writing):
        os.close(descriptor)


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("convoy", logging.INFO, "", 0, text, None, None)


def read_until(reading: int, wanted: bytes) -> bytes:
    found = b""
    while wanted not in found:
        found += os.read(reading, 1 << 16)
    return found


def test_what_does_not_fit_is_counted_and_told_where_it_is_missing(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    writer = LogWriter(writing, room_bytes=100_000)
    token = logs.request_id.set("not-mine")
    for number in range(1000):
        writer.handle(record(f"before {number:04} " + "x" * 1000))
    logs.request_id.reset(token)
    dropped = writer.dropped_lines
    assert 700 < dropped < 1000
    writer.flush(0)  # comes back
    first = read_until(reading, b"dropped here")
    writer.handle(record("after"))
    log = (first + read_until(reading, b"after\n")).decode()
    lines = [line for line in log.splitlines() if line.startswith("before")]
    assert [int(line[7:11]) for line in lines] == list(range(1000 - dropped))
    assert re.findall(r"(\d+) log lines were dropped here", log) == [str(dropped)]
    assert "not-mine" not in log
    assert log.index("before") < log.index("were dropped here") < log.index("after")
    writer.close()


def test_a_line_larger_than_the_room_and_one_that_cannot_be_made_are_in_the_log(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    writer = LogWriter(writing, room_bytes=10)
    writer.handle(record("y" * 1000))
    writer.flush(60)  # waits for it
    assert os.read(reading, 1 << 16) == b"y" * 1000 + b"\n"
    writer.handle(logging.LogRecord("convoy", logging.INFO, "", 0, "%d", ("no number",), None))
    assert b"TypeError" in read_until(reading, b"TypeError")
    writer.close()


CRASH = """
import sys, threading
from convoy.app.server import logs
logs.configure("info", {form!r})
{before}
raise KeyError("what broke")
"""
IN_THREAD = "one = threading.Thread(target=lambda: 1 / 0, name='worker'); one.start(); one.join()"


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_traceback_of_a_crash_is_in_the_log_and_nothing_before_it_is_lost(form: str) -> None:
    before = f"for number in range(100): logs._log.info('line %d', number)\n{IN_THREAD}"
    done = subprocess.run(
        [sys.executable, "-c", CRASH.format(form=form, before=before)], cwd=ROOT, capture_output=True, check=False
    )
    log = done.stderr.decode()
    assert done.returncode == 1
    assert all(f"line {number}" in log for number in range(100))
    assert log.index("line 99") < log.index("ZeroDivisionError") < log.index("what broke")
    assert "thread worker" in log
    assert log.count("Traceback") == 2


def test_a_crash_ends_the_process_although_nobody_reads() -> None:
    before = "for number in range(100): logs._log.info('x' * 5000)"
    process = subprocess.Popen(
        [sys.executable, "-c", CRASH.format(form="text", before=before)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.wait(60) == 1
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()


def test_where_every_thread_is_can_be_said(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    writer = LogWriter(writing)
    writer.setFormatter(logs._Formatter())
    logs._log.addHandler(writer)
    try:
        logs.tell_stacks()
        assert b"test_where_every_thread_is_can_be_said" in read_until(reading, b"test_where_every_thread")
    finally:
        logs._log.removeHandler(writer)
        writer.close()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *(("/v2/models/digits/infer", "/v2/models/digits/infer"), ("a-1_b.c:d,e;f~%", "a-1_b.c:d,e;f~%")),
        ("/x 200 0.1 ms key admin", '"/x 200 0.1 ms key admin"'),
        *(("", '""'), ("a=b", '"a=b"'), ('say "x"', r'"say \"x\""'), ("x]", '"x]"'), ("a\\nb", r'"a\\nb"')),
        *(
            ("a\nb", r'"a\nb"'),
            ("\x1b[31m", r'"\x1b[31m"'),
            ("\x85\u2028\u00a0", r'"\x85\u2028\xa0"'),
            ("\x7f", r'"\x7f"'),
        ),
        *(("größe", "größe"), ("\U0001f600", "\U0001f600")),
    ],
)
def test_a_clients_word_is_one_field_of_a_line(text: str, shown: str) -> None:
    assert logs.field(text) == shown


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
    def facts() -> dict[str, object]:
        asked.append("facts")
        return {"model": "digits", "version": 2, "outcome": "late", "stages_ms": {"queue": 1.5}}

    AccessLog(ServeOptions(BodyLimits(1 << 20), decode_threads=1)).log(
        *("10.0.0.1", "POST /predictions/digits", "504", 12.25),
        is_error=True,
        trace=TRACE,
        key_name="ward-3",
        code="deadline_exceeded",
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
    names = ("client", "call", "status", "took_ms", "code", "key", "model", "version", "outcome", "stages_ms")
    assert [given[name] for name in names] == [
        *(
            "10.0.0.1",
            "POST /predictions/digits",
            504,
            12.25,
            "deadline_exceeded",
            "ward-3",
            "digits",
            2,
            "late",
            {"queue": 1.5},
        )
    ]
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
    assert f"10.0.0.1 POST /predictions/digits 504 12.2 ms deadline_exceeded key ward-3 trace {TRACE.decode()}" in line
    assert ('"stages_ms":{"queue":1.5}' in line) == (form == "json")


@pytest.mark.parametrize(
    ("host", "is_open", "told"),
    [
        ("0.0.0.0", True, "WARNING listening on http://0.0.0.0:8000 (all interfaces, no API key)"),
        ("::", True, "WARNING listening on http://[::]:8000 (all interfaces, no API key)"),
        ("10.0.0.5", True, "WARNING listening on http://10.0.0.5:8000 (no API key)"),
        ("0.0.0.0", False, "INFO listening on http://0.0.0.0:8000"),
        ("127.0.0.1", False, "INFO listening on http://127.0.0.1:8000"),
    ],
)
def test_a_server_that_anyone_can_use_says_so(
    host: str, is_open: bool, told: str, logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "convoy"):
        announce("http", host, 8000, is_open=is_open)
    (record,) = caplog.records
    assert f"{record.levelname} {record.getMessage()}" == told


@pytest.mark.parametrize(
    ("is_loopback", "keys", "is_open"),
    [(True, (), False), (False, (), True), (False, (ApiKey("a", "secret"),), False)],
)
def test_a_key_or_loopback_closes_a_server(is_loopback: bool, keys: tuple[ApiKey, ...], is_open: bool) -> None:
    options = ServeOptions(BodyLimits(1 << 20), decode_threads=1, is_loopback=is_loopback, api_keys=keys)
    assert options.is_open == is_open
