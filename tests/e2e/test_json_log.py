"""`--log-format json` and the start in few lines: what a machine reads of a server, and of each call if it is asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton

from tests.support.grpc_calls import row
from tests.support.pictures import digit
from tests.support.servers import FakeServer, rows_request, start_fake_server, start_server, wait_until
from tests.support.stores import StoreFolder

pytestmark = pytest.mark.slow
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SECRETS = ("open sesame", "abracadabra", "xyzzy")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    folder = tmp_path_factory.mktemp("config")
    for name, secret in zip(("default", "team-a", "admin"), SECRETS, strict=True):
        (folder / name).write_text(secret)
    keys = {"api_key_file": folder / "default", "keys": json.dumps({"team-a": str(folder / "team-a")})}
    tokens = {"admin_token_file": folder / "admin", "model_control": "explicit", "load_model": "*"}
    settings = {"log_format": "json", "access_log": "all", **keys, **tokens}
    with start_fake_server(**settings) as server:
        yield server


def lines(server: FakeServer) -> list[dict[str, Any]]:
    """All whole lines that it has written; each is an object."""
    return [json.loads(line) for line in server.log_so_far.rpartition("\n")[0].splitlines()]


def line_of(server: FakeServer, own_id: str) -> dict[str, Any]:
    """The access log's only line about a request."""

    def found() -> list[dict[str, Any]]:
        return [line for line in lines(server) if line.get("request_id") == own_id and "took_ms" in line]

    (line,) = wait_until(found, f"the log has {own_id}")
    assert isinstance(line, dict)
    return line


def headers(own_id: str, secret: str = "abracadabra") -> dict[str, str]:
    trace = f"00-{TRACE}-00f067aa0ba902b7-01"
    return {"Authorization": f"Bearer {secret}", "X-Request-Id": own_id, "traceparent": trace}


def test_a_call_is_one_object(server: FakeServer) -> None:
    assert server.post("/v2/models/rows/infer", json=rows_request(1.0), headers=headers("infer")).status_code == 200
    line = line_of(server, "infer")
    told = {name: line[name] for name in ("level", "trace_id", "key", "model", "version", "outcome", "status")}
    rest = {"model": "rows", "version": 1, "outcome": "answered", "status": 200}
    assert told == {"level": "INFO", "trace_id": TRACE, "key": "team-a", **rest}
    assert line["call"] == "POST /v2/models/rows/infer"
    stages = line["stages_ms"]
    assert stages.keys() == {"decode_wait", "decode", "queue", "copy_in", "compute", "copy_out", "encode"}
    assert 0 <= sum(stages.values()) <= line["took_ms"] + 1
    assert line["time"].endswith("+00:00")


def test_who_asked_how_and_with_what_outcome(server: FakeServer) -> None:
    server.post("/v2/models/rows/infer", json={"inputs": []}, headers=headers("invalid", "open sesame"))
    server.post("/v2/models/rows/infer", json=rows_request(1.0), headers=headers("unknown", "guess"))
    server.post("/v2/models/nobody/infer", json=rows_request(1.0), headers=headers("nobody"))
    server.post("/v2/repository/models/rows/load", headers=headers("load", "xyzzy"))
    server.get("/stats", headers=headers("stats"))
    told = {
        own_id: [line_of(server, own_id).get(name) for name in ("key", "model", "outcome", "status", "code")]
        for own_id in ("invalid", "unknown", "nobody", "load", "stats")
    }
    assert told == {
        "invalid": ["default", "rows", "invalid", 400, "invalid_request"],
        "unknown": [None, None, "unauthorised", 401, "unauthenticated"],
        "nobody": ["team-a", None, "invalid", 404, "unknown_model"],
        "load": ["admin", None, None, 200, None],
        "stats": ["team-a", None, None, 200, None],
    }
    server.switch_on("hold")
    server.post("/v2/models/rows/infer?timeout_ms=50", json=rows_request(1.0), headers=headers("late"))
    server.switch_off("hold")
    assert [line_of(server, "late")[name] for name in ("outcome", "status")] == ["late", 504]
    stats = headers("at-rest")
    wait_until(lambda: server.get("/stats", headers=stats).json()["unfinished_requests"] == 0, "all is answered")


def test_a_call_over_grpc_is_told_alike(server: FakeServer) -> None:
    own = {name.lower(): value for name, value in headers("by-grpc").items()}
    with triton.InferenceServerClient(server.grpc_address) as client:
        client.infer("rows", [row()], headers=own)
    line = line_of(server, "by-grpc")
    told = [line[name] for name in ("call", "key", "model", "version", "outcome", "grpc_status", "trace_id")]
    assert told == ["gRPC ModelInfer", "team-a", "rows", 1, "answered", "OK", TRACE]
    assert line["stages_ms"]["compute"] >= 0


def test_a_client_cannot_write_lines_and_no_secret_is_in_them(server: FakeServer) -> None:
    server.post("/predictions/x%0a%7b%22level%22%3a1%7d%1b[31m%e2%80%a8", headers=headers("lines"))
    assert line_of(server, "lines")["call"] == r"POST /predictions/x\n{" r'"level":1}\x1b[31m\u2028'
    assert "\x1b" not in server.log
    assert not [secret for secret in SECRETS if secret in server.log]


def test_the_start_says_what_serves_once_and_why_nothing_else_does(store: StoreFolder) -> None:
    store.add_digits(name="a")
    store.add_digits(name="b")
    with start_server(store=store.root, env={"CONVOY_ENGINE": "auto"}) as server:
        told = [line for line in server.log.splitlines() if "GET /v2/health" not in line]
        for name in ("a", "b"):
            assert len([line for line in told if f"loaded {name} version 1 on" in line]) == 1
        reasons = [
            line.partition("not available here: ")[2].partition(": ")[2]
            for line in told
            if "not available here" in line
        ]
        assert len(reasons) == len(set(reasons))
        assert "passed over" not in server.log
        others = [line for line in told if "loaded" not in line and "not available here" not in line]
        assert len(others) <= 3, others  # two ports, ready
        skipped = {reason for model in server.stats()["models"] for reason in model["why_not_others"]}
        assert skipped, "what the start leaves out is here"


def test_the_text_has_the_name_of_the_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("open sesame")
    with start_server("--access-log", "all", "--api-key-file", str(tmp_path / "key")) as server:
        own = {"Authorization": "Bearer open sesame"}
        assert server.post("/predictions/digits", content=digit("one"), headers=own).status_code == 200
        wait_until(lambda: "ms key default [request" in server.log_so_far, "the line has it")
        assert "sesame" not in server.log
