"""The served OpenAPI document tells the truth: whatever is generated from it gets a documented answer.

Examples are drawn from the document by schemathesis, with the seed printed by a failure; only names and
versions are steered, because random ones would never find a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis.checks import (
    CheckFunction,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from convoy.models.errors import error_kinds
from tests.support.servers import FakeServer, start_fake_server, wait_until

SEED = 20
CHECKS: list[CheckFunction] = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
STEERED = {
    "model": ["rows", "images", "echo_fp32", "echo_bytes", "scalar_int8"],
    "version": [1],
    "name": ["region"],
}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    options = {"access_log": "off", "max_body_mb": 2, "allow_shared_memory": True}
    with start_fake_server(fake={"echo": True}, **options) as server:
        yield server
        assert server.is_ready()
        wait_until(server.is_at_rest, "nothing is held after all these requests")


def served_document(server: FakeServer) -> dict[str, Any]:
    """The document as it is served, but for the values of names."""
    document: dict[str, Any] = server.get("/openapi.json").json()
    for path in document["paths"].values():
        for operation in path.values():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path" and parameter["name"] in STEERED:
                    known = {"enum": STEERED[parameter["name"]]}
                    parameter["schema"] = {"anyOf": [known, parameter["schema"]]}
    return document


def explore(server: FakeServer, examples: int) -> int:
    """So many requests for every operation; how many operations there are."""
    schema = schemathesis.openapi.from_dict(served_document(server))
    schema.config.update(base_url=server.url)
    operations = [result.ok() for result in schema.get_all_operations()]
    for operation in operations:

        @seed(SEED)
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def holds(case: Any) -> None:
            response = case.call(timeout=30)
            case.validate_response(response, checks=CHECKS)
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                assert list(response.json()) == ["error", "code"]

        holds()
    return len(operations)


def test_every_operation_answers_as_documented(server: FakeServer) -> None:
    assert explore(server, examples=5) >= 24


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_operation_answers_as_documented_for_long(server: FakeServer) -> None:
    assert explore(server, examples=150) >= 24


def test_the_document_hides_what_this_server_does_not_offer() -> None:
    options = {"model_control": "explicit", "allow_shared_memory": True}
    documented = []
    for offered in ({}, options):
        with start_fake_server(access_log="off", **offered) as server:
            documented.append(set(server.get("/openapi.json").json()["paths"]))
    plain, whole = documented
    of_options = {path for path in whole if path.endswith(("/load", "/unload")) or "/systemsharedmemory/" in path}
    assert len(of_options) == 7
    assert whole - plain == of_options
    assert plain < whole
    never = ("/trace/", "/logging", "/cudasharedmemory/", "{repository}")
    assert not [path for path in whole if any(part in path for part in never)]


def test_the_document_lists_the_codes(server: FakeServer) -> None:
    document = server.get("/openapi.json").json()
    assert document["components"]["schemas"]["ErrorBody"]["properties"]["code"]["enum"] == sorted(error_kinds())


def test_the_document_promises_nothing_that_the_framework_says_by_itself(server: FakeServer) -> None:
    document = server.get("/openapi.json").json()
    operations = [one for path in document["paths"].values() for one in path.values()]
    assert not [one["summary"] for one in operations if "422" in one["responses"]]
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert len({one["operationId"] for one in operations}) == len(operations)
