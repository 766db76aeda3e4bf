"""`python -m convoy.app.client.standalone DIST`: build convoy-client's sdist and wheel into a folder.

The client's modules are copied from the checkout into one package, `convoy_client`, with their imports renamed.
It shares no file with convoy-serve, so both can be installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from convoy.app.version import VERSION

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
_SHARED = (
    *("answers", "errors", "files", "geometry", "image_files", "priorities", "run_lengths", "spec", "tasks"),
    *("tensors", "tls"),
)
MODULES = {
    "convoy.app.client": ("client", "grpc_wire", "http_wire", "options", "records", "retry"),
    "convoy.app.python": ("values",),
    "convoy.models": _SHARED,
}
_NAMES = "|".join(rf"{package}\.(?={name}\b)" for package, names in MODULES.items() for name in names)
_OURS = re.compile(rf"\b(?:{_NAMES}|convoy\.(?=(?:Async)?Client\b))")


def write_project(folder: Path) -> None:
    """Write the sources of convoy-client into an empty folder."""
    package = folder / "convoy_client"
    package.mkdir()
    files = {f"{name}.py": _folder(home) / f"{name}.py" for home, names in MODULES.items() for name in names}
    for name, file in {"__init__.py": HERE / "convoy_client.py", **files}.items():
        (package / name).write_text(_OURS.sub("convoy_client.", file.read_text()))
    for file in (HERE / "README.md", ROOT / "LICENSE"):
        shutil.copy(file, folder)
    project = (HERE / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(project.replace('version = "0"', f'version = "{VERSION}"'))


def _folder(package: str) -> Path:
    return ROOT.joinpath(*package.split(".")[1:])


def main() -> None:
    dist = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as folder:
        write_project(Path(folder))
        subprocess.run([sys.executable, "-m", "build", "--outdir", str(dist), folder], check=True)


if __name__ == "__main__":
    main()
