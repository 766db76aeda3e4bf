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
