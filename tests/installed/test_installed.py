"""Convoy as it is installed, a checkout or a wheel, inside a project that has folders of our names.

`make wheel` has built what is looked at here, and says where in DIST; otherwise it is built for the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.servers import Server
from tests.support.stores import DATA, ROOT, digit

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
OURS = ("app", "export", "loadtest", "models")
# Needs a checkout, which whoever installs a wheel has not got.
DEVELOPMENT = ("convoy.app.client.standalone", "convoy.loadtest.peers")
NETWORK = """
import torch
from app.width import WIDTH
from models import head

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Conv2d(3, WIDTH, 3, padding=1)
        self.head = head.make(WIDTH)

    def forward(self, images):
        return self.head(torch.relu(self.body(images)).mean((2, 3)))

def make():
    torch.manual_seed(0)
    return Net().eval()
"""


@dataclass(frozen=True)
class Installed:
    """A Convoy: the interpreter to run, what it needs on its path, and the folder that it is to be imported from."""

    python: str
    path: str
    root: Path

    def run(self, project: Path, *words: str, timeout_s: float = 300.0) -> str:
        """What it prints when it is run from within `project`."""
        done = subprocess.run(
            [self.python, *words], capture_output=True, text=True, env=self.env(), cwd=project, timeout=timeout_s
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def env(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CONVOY_", "PYTHON"))}
        return {**kept, **({"PYTHONPATH": self.path} if self.path else {})}

    @contextmanager
    def serving(self, project: Path) -> Iterator[Server]:
        """A server of the bundled demo, started in `project`."""
        words = ("serve", "--host", "127.0.0.1", "--port", "0", "--grpc-port", "0")
        with (project / "server.log").open("wb") as log:
            process = subprocess.Popen(
                [self.python, "-m", "convoy", *words], cwd=project, env=self.env(), stdout=log, stderr=log
            )
        server = Server(process, project / "server.log")
        try:
            server.await_port()
            server.await_ready()
            yield server
        finally:
            server.signal()
            assert server.wait() == 0, server.log


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist as an installer would: in isolation."""
    folder = Path(given).absolute() if (given := os.environ.get("DIST")) else tmp_path_factory.mktemp("dist")
    if not given:
        build = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
        done = subprocess.run(build, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (found,) = folder.glob("convoy_serve-*.whl")
    return found


@pytest.fixture(scope="module")
def client_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(given).absolute() if (given := os.environ.get("DIST")) else tmp_path_factory.mktemp("client")
    if not given:
        build = [sys.executable, "-m", "convoy.app.client.standalone", str(folder)]
        done = subprocess.run(build, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (found,) = folder.glob("convoy_client-*.whl")
    return found


@pytest.fixture(scope="module", params=["checkout", "wheel"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Beside the libraries of this interpreter, which are the checkout's."""
    if request.param == "checkout":
        return Installed(sys.executable, "", ROOT)  # as `pip install --editable` left it
    folder = tmp_path_factory.mktemp(request.param)
    with zipfile.ZipFile(request.getfixturevalue("wheel")) as archive:  # what an installer does with it
        archive.extractall(folder)
    return Installed(sys.executable, str(folder), folder)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's own, with packages of our folders' names: two ordinary ones, two without an `__init__.py`."""
    folder = tmp_path / "project"
    for name in OURS:
        (folder / name).mkdir(parents=True)
    for name in ("app", "models"):
        (folder / name / "__init__.py").touch()
    (folder / "app" / "width.py").write_text("WIDTH = 4\n")
    (folder / "models" / "head.py").write_text(
        "import torch\n\ndef make(width):\n    return torch.nn.Linear(width, 3)\n"
    )
    (folder / "export" / "mine.py").touch()
    (folder / "loadtest" / "mine.py").touch()
    (folder / "net.py").write_text(NETWORK)
    return folder


def test_each_finds_its_own(installed: Installed, project: Path) -> None:
    names = [f"convoy.{name}" for name in ("app.version", "export.options", "loadtest.options", "models.store")]
    theirs = ["app.width", "export.mine", "loadtest.mine", "models.head"]
    script = "import importlib, sys\nfor name in sys.argv[1:]: print(importlib.import_module(name).__file__)"
    (project / "show.py").write_text(script)
    found = installed.run(project, "show.py", *names, *theirs).split()
    assert [Path(one).resolve().is_relative_to(installed.root.resolve()) for one in found[:4]] == [True] * 4
    assert [Path(one) for one in found[4:]] == [project / f"{name.replace('.', '/')}.py" for name in theirs]


def test_a_script_beside_a_clone_called_convoy_finds_the_package(tmp_path: Path) -> None:
    """By itself Python takes the clone's folder for a namespace package. No library is needed to see that."""
    clone = tmp_path / "convoy"
    shutil.copytree(ROOT, clone, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info"))
    pip = "PIP_INSTALL=.venv/bin/pip install --quiet --disable-pip-version-check --no-deps"
    subprocess.run(["make", "-C", str(clone), ".venv/.serve", f"PYTHON={sys.executable}", pip], check=True)
    (tmp_path / "script.py").write_text("import convoy\nprint(convoy.ConvoyError.__name__, convoy.__file__)\n")
    python = Installed(str(clone / ".venv" / "bin" / "python"), "", clone)
    name, file = python.run(tmp_path, "script.py").split()
    assert name == "ConvoyError"
    assert Path(file).resolve() == clone / "convoy" / "__init__.py"


def test_the_command_serves_from_there(installed: Installed, project: Path) -> None:
    with installed.serving(project) as server:
        assert server.seven() == ("1", "7")


def test_an_engine_answers_in_a_program_of_the_project(installed: Installed, project: Path) -> None:
    (project / "ask.py").write_text(
        "import convoy\nfrom app.width import WIDTH\n"
        "with convoy.Engine() as engine:\n    print(WIDTH, engine.predict('digits', 'seven.png').best.label)\n"
    )
    (project / "seven.png").write_bytes(digit("seven"))
    assert installed.run(project, "ask.py").split() == ["4", "7"]


def test_a_network_that_is_made_of_the_projects_packages_is_exported(installed: Installed, project: Path) -> None:
    words = ("net.py:make", "--name", "net", "--input", "3x16x16", "--preprocess", "unit", "--precisions", "fp32")
    told = installed.run(project, "-m", "convoy", "export", *words, "--random-weights", "--store", "store")
    assert (project / "store" / "net" / "1" / "fp32.onnx").is_file(), told


def test_the_wheel_has_what_serves_and_not_what_develops(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    files = zipfile.ZipFile(wheel).namelist()
    assert {top for file in files if ".dist-info" not in (top := file.partition("/")[0])} == {"convoy"}
    modules = {file.rpartition("/")[0].replace("/", ".") for file in files}
    assert {"convoy.app.http", "convoy.export.report", "convoy.loadtest.simulation"} <= modules
    assert not [one for one in modules if one.startswith(DEVELOPMENT)]
    assert {"convoy/models/demo/digits/1/manifest.json", "convoy/app/http/page_parts/page.html"} <= set(files)
    assert {"convoy/models/page/chart.css", "convoy/export/report/page.css"} <= set(files)


def bare_environment(folder: Path, project: Path, *installed: str) -> Installed:
    home = folder / "environment"
    venv.create(home, with_pip=True)
    bare = Installed(str(home / "bin" / "python"), "", home)
    pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    bare.run(project, *pip, "--constraint", str(ROOT / "constraints.txt"), *installed)
    return bare


def test_the_wheel_serves_in_a_bare_environment(wheel: Path, project: Path, tmp_path: Path) -> None:
    bare = bare_environment(tmp_path, project, f"{wheel}[cpu]")
    with bare.serving(project) as server:
        assert server.seven() == ("1", "7")
        six = str(DATA / "six.png")
        told = bare.run(project, "-m", "convoy", "predict", "digits", six, "--url", server.url)
    assert "6" in told


def test_the_client_alone_predicts_in_a_bare_environment(client_wheel: Path, project: Path, tmp_path: Path) -> None:
    """Its files are its own, so that it can be installed beside convoy-serve."""
    files = zipfile.ZipFile(client_wheel).namelist()
    assert {top for file in files if ".dist-info" not in (top := file.partition("/")[0])} == {"convoy_client"}
    bare = bare_environment(tmp_path, project, str(client_wheel))
    (project / "ask.py").write_text(
        "import sys\nfrom importlib.util import find_spec\nfrom convoy_client import Client\n"
        "with Client(sys.argv[1]) as client:\n    print(client.predict('digits', sys.argv[2]).best.label)\n"
        "print([name for name in ('convoy', 'fastapi', 'onnxruntime') if find_spec(name)])\n"
    )
    with Installed(sys.executable, "", ROOT).serving(project) as server:
        asked = bare.run(project, "ask.py", f"127.0.0.1:{server.port}", str(DATA / "six.png"))
    assert asked.splitlines() == ["6", "[]"]
