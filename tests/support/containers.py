"""The container image, built and run without a container engine: buildah as root, in a store of the test's own.

Knows buildah and debootstrap. The base is a bare Debian with Python, made here, so that no registry of images is
needed; packages come from wherever this machine's apt and pip get theirs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.support.servers import Server, free_port
from tests.support.stores import ROOT

# The Dockerfile's targets that are tested.
TARGETS_NAMED_BY = "IMAGE_TARGET"
TARGETS = tuple(os.environ.get(TARGETS_NAMED_BY, "cpu rtx").split())
BUILD_S = 2400
# How this machine reaches its package index; a base that cannot reach it builds nothing.
_INDEX_SETTINGS = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")


def why_not() -> str | None:
    """What this machine lacks for building images; None when it lacks nothing."""
    missing = [tool for tool in ("buildah", "debootstrap") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not installed; run apt-get install buildah debootstrap"
    return None if os.geteuid() == 0 else "images are built as root"


class Images:
    """A store of images and containers in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._built: dict[str, str] = {}

    def buildah(self, *arguments: str) -> str:
        """Run a command to its end and give what it wrote to stdout."""
        done = subprocess.run(self.command(*arguments), capture_output=True, text=True, timeout=BUILD_S, check=False)
        assert done.returncode == 0, f"buildah {' '.join(arguments)}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout.strip()

    def command(self, *arguments: str) -> list[str]:
        place = ("--root", str(self._folder / "images"), "--runroot", str(self._folder / "run"))
        return ["buildah", "--storage-driver", "vfs", *place, *arguments]

    def make_base(self) -> str:
        """Debian 13 with its Python 3.13 and nothing else; the name of the image."""
        root = self._folder / "debian"
        packages = "--include=python3-venv,ca-certificates"
        command = ["debootstrap", "--variant=minbase", packages, "trixie", str(root)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
        assert done.returncode == 0, f"debootstrap failed:\n{done.stdout[-4000:]}"
        for name in _INDEX_SETTINGS:
            if Path(name).exists():
                shutil.copy(name, root / name.lstrip("/"))
        container = self.buildah("from", "scratch")
        self.buildah("copy", "--quiet", container, str(root), "/")
        self.buildah("commit", "--quiet", "--rm", container, "base")
        shutil.rmtree(root)
        return "localhost/base"

    def build(self, target: str, base: str) -> str:
        """Build the Dockerfile's target, without what only NVIDIA's index has, or take it as it was built before."""
        if target not in self._built:
            options = ("--target", target, f"--build-arg=BASE={base}", "--build-arg=NVIDIA_INDEX=")
            self._built[target] = self.build_folder(ROOT, f"convoy:{target}", *options)
        return self._built[target]

    def build_folder(self, folder: Path, tag: str, *options: str) -> str:
        """Build a folder that has a Dockerfile, as a user would; the image's name."""
        # Docker's format: the other one has no health check.
        how = ("--isolation", "chroot", "--format", "docker", "--tag", tag)
        self.buildah("bud", *how, *options, str(folder))
        return f"localhost/{tag}"

    def bytes_of(self, image: str) -> int:
        """What its files take, shared ones counted once."""
        with self.container(image) as container:
            root = self.buildah("mount", container.name)
            return int(
                subprocess.run(["du", "-sb", root], capture_output=True, text=True, check=True).stdout.split()[0]
            )

    @contextmanager
    def container(self, image: str, *volumes: str) -> Iterator[Container]:
        """A container from the image; `volumes` as for `docker run -v`."""
        name = self.buildah("from", image)
        try:
            yield Container(self, name, volumes)
        finally:
            self.buildah("rm", name)


class Container:
    """What `docker run` would make of an image, with the host's network."""

    def __init__(self, images: Images, name: str, volumes: tuple[str, ...]) -> None:
        self._images, self.name = images, name
        self._volumes = [f"--volume={volume}" for volume in volumes]
        self.config: dict[str, Any] = json.loads(images.buildah("inspect", name))["Docker"]["config"]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command beside the server, as `docker exec` runs it."""
        return subprocess.run(self._command(command), capture_output=True, text=True, timeout=120, check=False)

    def check_health(self) -> int:
        """What the image's own health check says: 0 is well."""
        kind, *command = self.config["Healthcheck"]["Test"]
        assert kind == "CMD"
        return self.run(*command).returncode

    @contextmanager
    def serving(self) -> Iterator[Server]:
        """The image's entry point on free ports that only the command line names; ready when the body starts."""
        ports = ("--port", str(free_port()), "--grpc-port", str(free_port()))
        command = self._command([*self.config["Entrypoint"], *self.config["Cmd"], *ports])
        with tempfile.NamedTemporaryFile(prefix="convoy-container-") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            server = Server(process, Path(log.name))
            try:
                server.await_port()
                server.await_ready()
                yield server
            finally:
                for one in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
                    one.kill()
                process.wait()

    def _command(self, command: list[str] | tuple[str, ...]) -> list[str]:
        how = ("--isolation", "chroot", *self._volumes)
        return self._images.command("run", *how, self.name, "--", *command)


def main_process(server: Server) -> psutil.Process:
    """The first process in the container: the innermost of what buildah starts, for no walls hide their numbers."""
    process = psutil.Process(server.process.pid)
    while "python" not in Path(process.exe()).name:
        (process,) = process.children()
    return process
