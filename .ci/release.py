"""`make release`: what a release needs beside its packages: notes, an SBOM for each image, and checksums.

    python .ci/release.py check [--tag v0.1.0]     check that version, changelog and tag agree
    python .ci/release.py complete DIST            add the files to the folder with the packages

Publishes nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ("cpu", "gpu", "rtx")
_HEADING = re.compile(r"^## (\S+) \((.+)\)$", re.MULTILINE)


def version() -> str:
    found = re.search(r'^VERSION = "(.+)"$', (ROOT / "app" / "version.py").read_text(), re.MULTILINE)
    assert found is not None, "app/version.py has the version"
    return found[1]


def check(changelog: str, version: str, tag: str) -> str:
    """The problems; empty if there are none. Without a tag, a version may be unreleased."""
    found = _HEADING.search(changelog)
    if found is None or found[1] != version:
        return f"CHANGELOG.md begins with {found and found[1]}, but app/version.py has {version}"
    if tag and tag != f"v{version}":
        return f"the tag is {tag}, but app/version.py has {version}: the tag must be v{version}"
    if tag and not re.fullmatch(r"\d{4}-\d\d-\d\d", found[2]):
        return f"CHANGELOG.md says {version} ({found[2]}); put the date of the release there, such as 2026-01-31"
    return ""


def notes(changelog: str) -> str:
    """The first version's part of the changelog, without its heading."""
    _, first, *_ = re.split(r"^## .*\n", changelog, flags=re.MULTILINE)
    return first.strip() + "\n"


def write_materials(dist: Path) -> None:
    """Write what each image installs, from its lock, as CycloneDX JSON."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "pyproject.toml"  # the tool requires a version there
        text = (ROOT / "pyproject.toml").read_text()
        project.write_text(text.replace('dynamic = ["version"]', f'version = "{version()}"'))
        for image in IMAGES:
            tool = (sys.executable, "-W", "ignore", "-m", "cyclonedx_py", "requirements", "--output-reproducible")
            out = dist / f"convoy_serve-{version()}-{image}.cdx.json"
            lock = ROOT / "locks" / f"{image}.txt"
            subprocess.run([*tool, "--pyproject", str(project), "--output-file", str(out), str(lock)], check=True)


def write_checksums(dist: Path) -> None:
    """For `sha256sum --check SHA256SUMS`."""
    files = sorted(one for one in dist.iterdir() if one.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one.name}\n" for one in files]
    (dist / "SHA256SUMS").write_text("".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser()
    tasks = parser.add_subparsers(dest="task", required=True)
    tasks.add_parser("check").add_argument("--tag", default="")
    tasks.add_parser("complete").add_argument("dist", type=Path)
    asked = parser.parse_args()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    if asked.task == "check":
        if wrong := check(changelog, version(), asked.tag):
            sys.exit(wrong)
        return
    (asked.dist / "RELEASE_NOTES.md").write_text(notes(changelog))
    write_materials(asked.dist)
    write_checksums(asked.dist)


if __name__ == "__main__":
    main()
