"""What `make release` adds to the packages, and that every workflow calls targets of the Makefile."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml

from convoy.app.version import VERSION
from tests.support.stores import ROOT
from tests.test_documents import TARGETS

SCRIPT = ROOT / ".ci" / "release.py"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("release", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RELEASE = load_script()
DATED = "# Changelog\n\nFor users.\n\n## 1.2.3 (2026-01-31)\n\n- new\n\n## 1.2.2 (2026-01-01)\n\n- old\n"
UNRELEASED = DATED.replace("2026-01-31", "unreleased")


@pytest.mark.parametrize(
    ("changelog", "version", "tag", "words"),
    [
        (DATED, "1.2.3", "v1.2.3", ""),
        (UNRELEASED, "1.2.3", "", ""),
        (UNRELEASED, "1.2.3", "v1.2.3", "put the date"),
        (DATED, "1.2.3", "1.2.3", "the tag must be v1.2.3"),
        (DATED, "1.2.4", "v1.2.4", "begins with 1.2.3"),
        ("", "1.2.3", "", "begins with None"),
    ],
)
def test_version_changelog_and_tag_agree(changelog: str, version: str, tag: str, words: str) -> None:
    wrong = RELEASE.check(changelog, version, tag)
    assert words in wrong
    assert bool(wrong) == bool(words)


def test_this_version_could_be_released() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert RELEASE.version() == VERSION
    assert RELEASE.check(changelog, VERSION, "") == ""
    assert len(RELEASE.notes(changelog)) > 1000


def test_the_notes_are_of_the_first_version_alone() -> None:
    assert RELEASE.notes(DATED) == "- new\n"


def test_what_publishes_the_images_is_printed_and_not_run() -> None:
    words = ("make", "-C", str(ROOT), "--dry-run", "publish-image", "IMAGE_TARGET=rtx", "IMAGE=example/convoy")
    told = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert f"buildah push example/convoy:{VERSION}-rtx" in told
    assert re.search(rf"buildah build .*--target rtx --tag example/convoy:{VERSION}-rtx \.", told)
    stages = re.findall(r"^FROM \S+ AS (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert set(RELEASE.IMAGES) <= set(stages)


@pytest.mark.long
def test_a_release_has_bills_of_materials_and_checksums(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    dist.mkdir()
    (dist / "convoy_serve.whl").write_bytes(b"wheel")
    venv.create(tmp_path / "environment", with_pip=True)
    python = str(tmp_path / "environment" / "bin" / "python")
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), "cyclonedx-bom"], check=True)
    subprocess.run([python, str(SCRIPT), "complete", str(dist)], check=True)
    for image in RELEASE.IMAGES:
        document = json.loads((dist / f"convoy_serve-{VERSION}-{image}.cdx.json").read_text())
        assert document["metadata"]["component"]["version"] == VERSION
        pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "locks" / f"{image}.txt").read_text(), re.MULTILINE))
        assert {one["name"] for one in document["components"]} == pinned
    sums = dict(reversed(line.split("  ")) for line in (dist / "SHA256SUMS").read_text().splitlines())
    assert sums["convoy_serve.whl"] == hashlib.sha256(b"wheel").hexdigest()
    assert sums.keys() == {one.name for one in dist.iterdir()} - {"SHA256SUMS"}


def jobs(workflow: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(workflow.read_text())["jobs"]
    return found


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda one: one.stem)
def test_a_workflow_calls_targets_of_the_makefile(workflow: Path) -> None:
    lines = [step.get("run", "") for job in jobs(workflow).values() for step in job["steps"]]
    called = [one for line in lines for one in re.findall(r"^(?:sudo )?make ([\w-]+)", line, re.MULTILINE)]
    assert called
    assert set(called) <= TARGETS
    for job in jobs(workflow).values():
        assert job["timeout-minutes"] <= 90


def test_a_tag_alone_releases_and_no_password_is_kept() -> None:
    workflow = ROOT / ".github" / "workflows" / "release.yml"
    document = yaml.safe_load(workflow.read_text())
    assert document[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    of_jobs = jobs(workflow)
    assert {name for name, job in of_jobs.items() if "id-token" in job.get("permissions", {})} == {"pypi"}
    assert re.findall(r"secrets\.(\w+)", workflow.read_text()) == ["GITHUB_TOKEN"]
    assert set(of_jobs["images"]["strategy"]["matrix"]["target"]) == set(RELEASE.IMAGES)
