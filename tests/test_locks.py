"""What the image installs is what everything else is tested with, and every file of it has a hash: `make lock`."""

from __future__ import annotations

import re

import pytest

from tests.support.stores import ROOT
from tests.test_licences import brought_by

LOCKS = sorted((ROOT / "locks").glob("*.txt"))
PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)


def pins(text: str) -> dict[str, str]:
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in PIN.findall(text)}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_a_lock_has_the_versions_of_all_installs_with_their_hashes(lock):
    text = lock.read_text()
    tested = pins((ROOT / "constraints.txt").read_text())
    # What only other platforms need is in no install of ours.
    assert {name: version for name, version in pins(text).items() if tested.get(name, version) != version} == {}
    for entry in re.split(r"\n(?=\S)", text.strip()):
        assert "--hash=sha256:" in entry, entry


@pytest.mark.parametrize("extra", ["cpu", "rtx"])
def test_a_lock_leaves_nothing_out(extra):
    assert brought_by(extra) | brought_by("otel") <= pins((ROOT / "locks" / f"{extra}.txt").read_text()).keys()


def test_the_image_installs_with_one_pip_whatever_its_base_has():
    """The base's own pip, which may be too old for the locks, installs that one with its hash and nothing else."""
    pinned = pins((ROOT / "constraints.txt").read_text())["pip"]
    assert pins((ROOT / "locks" / "pip.txt").read_text()) == {"pip": pinned}
    stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    parents = {name: parent for parent, name in (stage.splitlines()[0].split(" AS ") for stage in stages)}
    for stage in stages:
        name = stage.splitlines()[0].split(" AS ")[1]
        installs = re.findall(r"pip install (.*)", stage)
        if name == "python":
            assert installs == ["--require-hashes --requirement /src/locks/pip.txt"]
        elif installs:
            assert "python" in ancestors(name, parents), name


def ancestors(stage: str, parents: dict[str, str]) -> list[str]:
    parent = parents.get(stage)
    return [] if parent is None else [parent, *ancestors(parent, parents)]
