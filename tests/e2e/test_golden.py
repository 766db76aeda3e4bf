"""Bundles as earlier versions wrote them: every later one serves them, with the answers of the day they were made.

A schema version that a release has written stays here as it is (docs/compatibility.md). The answers of a new one are
written once: `python -m tests.e2e.test_golden FOLDER`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from convoy.models.bundle import SCHEMA_VERSION, read_manifest
from tests.support.servers import Server, start_server
from tests.support.stores import DATA

GOLDEN = sorted((DATA / "golden").iterdir())
IMAGES = ("one", "four", "seven", "eight")


def answers(server: Server, store: Path) -> dict[str, Any]:
    """What the server says of everything in `store`, rounded to what another machine's fp32 agrees with."""
    told: dict[str, Any] = {}
    for name in sorted(folder.name for folder in store.iterdir() if folder.is_dir()):
        metadata = server.get(f"/v2/models/{name}").json()
        told[name] = {"inputs": metadata["inputs"], "outputs": metadata["outputs"]}
        if read_manifest(store / name / "1").spec.image is None:
            (tensor,) = metadata["inputs"]
            size = tensor["shape"][1]
            ramp = {**tensor, "shape": [2, size], "data": [index / 10 for index in range(2 * size)]}
            told[name]["infer"] = server.post(f"/v2/models/{name}/infer", json={"inputs": [ramp]}).json()["outputs"]
            continue
        for image in IMAGES:
            answer = server.post(f"/predictions/{name}", content=(DATA / f"{image}.png").read_bytes())
            told[name][image] = answer.json()["predictions"]
    return _rounded(told)  # type: ignore[no-any-return]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("store", GOLDEN, ids=lambda store: store.name)
def test_a_bundle_of_an_earlier_version_answers_as_it_did(store: Path) -> None:
    with start_server("--engine", "auto", "--precision", "fp32", store=store) as server:
        now, then = answers(server, store), json.loads((store / "answers.json").read_text())
    assert now.keys() == then.keys()
    for name in then:
        assert now[name] == _nearly(then[name]), name


def _nearly(then: Any) -> Any:
    """`then`, with pytest's approximation for every number in it."""
    if isinstance(then, dict):
        return {key: _nearly(one) for key, one in then.items()}
    if isinstance(then, list):
        return [_nearly(one) for one in then]
    return pytest.approx(then, abs=1e-3) if isinstance(then, float) else then


def test_the_present_schema_is_among_them() -> None:
    written = {read_manifest(manifest.parent).schema_version for manifest in GOLDEN[-1].glob("*/*/manifest.json")}
    assert written == {SCHEMA_VERSION}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with start_server("--precision", "fp32", store=folder) as one:
        (folder / "answers.json").write_text(json.dumps(answers(one, folder), indent=1) + "\n")
