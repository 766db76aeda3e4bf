"""docs/internals/licences.md names all that an install brings: `python -m tests.test_licences` writes it."""

from __future__ import annotations

import re
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.stores import ROOT

PAGE = ROOT / "docs" / "internals" / "licences.md"
MARK = "<!-- python -m tests.test_licences -->\n"
# What an install for serving may bring, by extra; training and export are for one's own machine.
EXTRAS = ("", "cpu", "openvino", "rtx", "s3", "batch", "otel", "signing")
# Whose metadata names no licence; read in the files of the package.
UNNAMED = {"pysimdjson": "MIT OR Apache-2.0", "sigstore-models": "MIT", "tensorrt-rtx": "proprietary"}
BRIEF = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Other/Proprietary License": "proprietary",
    "Python Software Foundation License": "PSF-2.0",
}


def brought_by(extra: str) -> set[str]:
    """The packages that `convoy-serve[extra]` brings on this platform, itself left out."""
    found: set[str] = set()
    todo = [("convoy-serve", extra)]
    while todo:
        name, wanted = todo.pop()
        for text in metadata.requires(name) or ():
            one = Requirement(text)
            if one.marker is None or one.marker.evaluate({"extra": wanted}) or one.marker.evaluate({"extra": ""}):
                package = canonicalize_name(one.name)
                todo.extend((package, more) for more in one.extras)
                if package not in found and package != "convoy-serve":
                    found.add(package)
                    todo.append((package, ""))
    return found


def licence(package: str) -> str:
    """As the package's own metadata has it, briefly."""
    if package in UNNAMED:
        return UNNAMED[package]
    told = metadata.metadata(package)
    if expression := told.get("License-Expression"):
        return expression
    classes = [one.rpartition(" :: ")[2] for one in told.get_all("Classifier") or () if one.startswith("License ::")]
    named = classes or [re.sub(r"\s+", " ", told.get("License") or "").strip()]
    assert named[0], f"{package} names no licence"
    return ", ".join(BRIEF.get(one, one) for one in named)


def table() -> str:
    by_extra = {extra: brought_by(extra) for extra in EXTRAS}
    lines = ["| package | licence | brought by |", "|---|---|---|"]
    for package in sorted(set().union(*by_extra.values())):
        always = package in by_extra[""]
        extras = "every install" if always else ", ".join(f"`[{one}]`" for one in EXTRAS if package in by_extra[one])
        lines.append(f"| {package} | {licence(package)} | {extras} |")
    return "\n".join(lines) + "\n"


def test_the_page_names_what_an_install_brings() -> None:
    try:
        metadata.version("onnxruntime")
    except metadata.PackageNotFoundError:
        pytest.skip("a machine with a GPU has ONNX Runtime's other package")
    assert PAGE.read_text().partition(MARK)[2] == table()


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + MARK + table())
