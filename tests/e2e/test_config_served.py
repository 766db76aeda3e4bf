"""Servers with a file of `--config`: what holds for single models, and what SIGHUP changes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import tritonclient.grpc as triton
import yaml

from tests.support.grpc_calls import status_of
from tests.support.servers import FakeServer, Server, start_fake_server, start_server, wait_until
from tests.support.stores import digit
from tests.support.wire import check_refused

INFER = "/v2/models/rows/infer"
pytestmark = pytest.mark.slow
BINARY_JSON = b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","parameters":{"binary_data_size":16}}]}'
BINARY = {"content": BINARY_JSON + bytes(16), "headers": {"Inference-Header-Content-Length": str(len(BINARY_JSON))}}


class File:
    """The file of a server, which can be changed under it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, document: dict[str, Any] | str) -> None:
        self.path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))

    def change(self, server: Server, document: dict[str, Any] | str, told: str = "reloaded the settings; ") -> None:
        """Return when the server has read it."""
        before = server.log_so_far.count(told)
        self.write(document)
        server.signal(signal.SIGHUP)
        wait_until(lambda: server.log_so_far.count(told) > before, f"the log has {told!r} once more")

    def key(self, name: str, secret: str) -> str:
        path = self.path.with_name(name)
        path.write_text(f"{secret}\n")
        return str(path)


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "convoy.yaml")


@contextmanager
def fake_server(file: File, document: dict[str, Any], **settings: Any) -> Iterator[FakeServer]:
    file.write(document)
    with start_fake_server(config=file.path, **settings) as server:
        yield server


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def status(client: httpx.Client, secret: str) -> int:
    return client.post(INFER, content=BINARY["content"], headers={**BINARY["headers"], **bearer(secret)}).status_code


def by_grpc(server: Server, secret: str) -> str:
    """The status of one call."""
    with triton.InferenceServerClient(server.grpc_address) as client:
        return status_of(client, headers={"authorization": f"Bearer {secret}"})


def levels(server: Server, model: str = "rows", secret: str = "any") -> tuple[int, int]:
    """How many levels of priority it has, and the one of requests that ask for none."""
    batching = server.get(f"/v2/models/{model}/config", headers=bearer(secret)).json()["dynamic_batching"]
    return batching["priority_levels"], batching["default_priority_level"]


def eventually(read: Callable[[], Any], expected: Any) -> None:
    """The log has it a moment before it holds."""
    wait_until(lambda: read() == expected, f"it is {expected}")


def test_keys_come_and_go_also_on_connections_that_are_open(file: File) -> None:
    first, second = file.key("first", "open sesame"), file.key("second", "abracadabra")
    with fake_server(file, {"keys": {"team-a": first}}) as server, server.client() as client:
        assert (status(client, "open sesame"), status(client, "abracadabra")) == (200, 401)
        assert (by_grpc(server, "open sesame"), by_grpc(server, "abracadabra")) == ("OK", "UNAUTHENTICATED")
        file.change(server, {"keys": {"team-b": second}}, "API keys: team-b")
        eventually(lambda: (status(client, "open sesame"), status(client, "abracadabra")), (401, 200))
        assert (by_grpc(server, "open sesame"), by_grpc(server, "abracadabra")) == ("UNAUTHENTICATED", "OK")
        file.key("second", "changed in its file")
        file.change(server, {"keys": {"team-b": second}}, "changed: the API keys; API keys: team-b")
        eventually(lambda: (status(client, "abracadabra"), status(client, "changed in its file")), (401, 200))
        file.change(server, {}, "requests need no API key any more")
        eventually(lambda: status(client, "nothing"), 200)
        assert not [secret for secret in ("open sesame", "abracadabra", "changed in") if secret in server.log]


def test_what_is_wrong_changes_nothing(file: File) -> None:
    key = file.key("first", "open sesame")
    good = {"keys": {"team-a": key}, "models": {"rows": {"default_priority": 1}}}
    with fake_server(file, good) as server, server.client() as client:
        for wrong, told in (
            ({**good, "mdels": {}}, "mdels: unknown option; did you mean models"),
            ({"keys": {"team-a": f"{key}-is-not-there"}}, "keys.team-a .*-is-not-there cannot be read"),
            ("keys: [", "is not YAML"),
        ):
            file.change(server, wrong, "nothing changed")
            assert told.partition(" .*")[0] in server.log
        assert (status(client, "open sesame"), status(client, "another")) == (200, 401)
        assert levels(server, secret="open sesame") == (3, 1)
        file.change(server, {}, "requests need no API key any more")
        eventually(lambda: status(client, "another"), 200)


def test_a_models_deadline_queue_and_priorities_change(file: File) -> None:
    def of_rows(**options: Any) -> dict[str, Any]:
        return {"models": {"rows": options, "images": {"max_queue": 5}}}

    before = of_rows(max_queue=3, priority_levels=5, default_priority=4)
    with fake_server(file, before, fake={"max_batch": 2}) as server:
        assert (levels(server), levels(server, "images")) == ((5, 4), (3, 2))
        file.change(server, of_rows(max_queue=2, default_timeout_ms=300, priority_levels=2))
        server.switch_on("hold")
        wait_until(lambda: server.infer(1.0).status_code == 504, "a request without a deadline has that of its model")
        assert levels(server) == (2, 2)
        server.switch_off("hold")
        wait_until(server.is_at_rest, "all is answered")
        file.change(server, {})
        assert levels(server) == (3, 2)


def test_the_servers_own_queue_stays_as_long_as_it_was(file: File) -> None:
    with fake_server(file, {"max_queue": 2}, fake={"max_batch": 1}) as server:
        for change in (None, {"max_queue": 6400, "models": {"images": {"max_queue": 5}}}):
            if change is not None:
                file.change(server, change, "max_queue: takes effect after a restart of the server")
            server.switch_on("hold")
            with ThreadPoolExecutor(12) as pool:
                asked = [pool.submit(server.infer, float(number)) for number in range(12)]
                # The others are held.
                refused = next(as_completed(asked)).result()
                check_refused(refused, 429, "Exceeds maximum queue size: 2 samples for 'rows'")
                server.switch_off("hold")
            wait_until(server.is_at_rest, "all is answered")


def test_a_default_priority_that_the_model_does_not_have_is_said(file: File) -> None:
    with fake_server(file, {"models": {"rows": {"default_priority": 9}}}) as server:
        assert levels(server) == (3, 3)
        told = "models.rows.default_priority is 9, but rows has 3 levels: requests without a priority get level 3"
        assert told in server.log
        file.change(server, {"models": {"rows": {"default_priority": 9, "priority_levels": 9}}})
        assert server.log.count("default_priority is 9") == 1


def test_what_needs_a_restart_or_another_load_is_said(file: File) -> None:
    with fake_server(file, {"max_body_mb": 8}) as server:
        after = {"max_body_mb": 9, "log_level": "debug", "models": {"rows": {"threads": 1, "max_queue": 9}}}
        for _ in range(2):  # as long as it waits for that
            file.change(server, after, "max_body_mb: takes effect after a restart of the server")
        assert "reloaded the settings; changed: log_level, models.rows.max_queue; API keys: none" in server.log
        assert "models.rows.threads: takes effect when the model is loaded again" in server.log
        file.change(server, {**after, "models": {"rwos": {"max_queue": 9}}})
        wait_until(lambda: "did you mean 'rows'?" in server.log_so_far, "the name is questioned")


def test_edge_processes_are_asked_for_in_vain_and_the_log_says_what_to_do(file: File) -> None:
    file.write({"edges": 2})
    with start_server("--config", str(file.path)) as server:
        assert server.post("/predictions/digits", content=digit("seven")).status_code == 200
        assert not psutil.Process(server.process.pid).children()
        assert (
            server.log.count(
                "--edges (CONVOY_EDGES, or edges in the file) is deprecated and has no effect: one process serves"
            )
            == 1
        )
        assert "run replicas: see docs/scaling.md" in server.log


def test_a_real_model_is_loaded_as_the_file_says(file: File) -> None:
    of_digits = {"max_batch": 2, "precision": "fp32", "threads": 1, "instances": 2, "warm_up_runs": 3}
    file.write({"port": 1, "models": {"digits": of_digits, "digit": {"max_batch": 1}}, "engine": "openvino"})
    misspelt = {"CONVOY_MAX_QEUE": "3", "CONVOY_EPOCHS": "3"}
    with start_server("--config", str(file.path), env=misspelt) as server:  # whose port and engine are said elsewhere
        config = server.get("/v2/models/digits/config").json()
        (group,) = config["instance_group"]
        assert (config["max_batch_size"], group["kind"], group["count"]) == (2, "KIND_CPU", 2)
        (digits,) = [one for one in server.stats()["models"] if one["name"] == "digits"]
        assert (digits["engine"], digits["precision"]) == ("onnxruntime-cpu", "fp32")
        assert [engine["device_id"] for engine in digits["engines"]] == ["cpu", "cpu/1"]
        assert server.post("/predictions/digits", content=digit("five")).status_code == 200
        assert "the configuration has options for model 'digit', which is not in" in server.log
        assert "did you mean 'digits'?" in server.log
        told = "ignored unknown environment variables: CONVOY_MAX_QEUE (did you mean CONVOY_MAX_QUEUE?)"
        assert server.log.count(told) == 1
