"""The documents' commands and examples, typed page by page, in the order in which they stand, in one folder.

A page with something to type has a row in SCENES, which says what its reader has before the first of it. What cannot be
typed here has a row in NOT_HERE with the reason; `tests/test_documents.py` reads that, too. A server that a command
starts runs until the next one is started or the page ends, on ports of its own in the place of the page's. What a page
shows behind a command must be what is printed, its fractions aside.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from convoy.models.tasks import DetectionOutputs
from tests.support.documents import PAGES, Block, blocks, name_of, parts, run_example
from tests.support.pictures import jpeg
from tests.support.servers import Server, free_port, start_server
from tests.support.stores import DATA, ROOT, StoreFolder
from tests.support.task_models import FixedOutput, add_colours, add_detector, stretched

# A pattern of what is not typed here (in a command, in an example behind `python of PAGE: `, or of a page), and why.
NOT_HERE = {
    r"^docker ": "no Docker is here; tests/image builds the image and runs it",
    r"^kubectl ": "no cluster is here; test_deploy.py gives the same files to kubectl",
    r"pip (install|download|wheel) ": "would change the environment of the tests, or load hundreds of megabytes",
    r"^make (test|peers|gpu-proof)\b": "these tests themselves, hours, or a GPU",
    r"^python -m (convoy\.loadtest\.peers|tests\.simulation\.against_server)\b": "hours on a quiet machine",
    r"^python -m tests\.gpu\.proof": "wants a GPU, or loads 200 MB; test_gpu_proof.py and test_gpu_pack.py",
    r" --ray$": "Ray is half a gigabyte; test_batch_command.py labels on it, among the long tests",
    r"^serve run ": "Ray is half a gigabyte; test_ray_serve.py deploys the same application, among the long tests",
    r" s3://": "no S3 is here; test_remote_serving.py serves from one that is played",
    r"torchvision:": "would load published weights, 100 MB",
    r"^convoy serve .*(--store /|--config)": "its paths are a server's; test_config_served.py serves from such files",
    r"^python of docs/ray\.md: ": "Ray is half a gigabyte; test_ray_serve.py has the same calls",
    r"^convoy export .*\becg\b": "a network of the reader's; test_export_outputs.py exports such",
    r"^(openssl|model_signing|convoy serve --require-signature) ": "wants keys; test_signed_served.py makes some",
    r"^convoy loadtest compare ": "refuses short runs that a busy machine voids; test_loadtest_compare.py has others",
    r"^python of docs/client\.md: [^$]*https://models": "wants certificates; test_tls_served.py makes some and runs it",
    r"^convoy serve --tls-cert-file ": "wants certificates; test_tls_served.py makes some and serves with them",
    r"^export OTEL_": "no collector is here; test_tracing.py tells one that is played",
    r"^docs/demo\.md$": "test_demo_whole.py has `make demo` type the whole page",
}


def nothing(folder: Path) -> None:
    """The reader has an empty folder."""


def digits(folder: Path) -> None:
    """The demo in a store, and pictures of digits: some in the folder, some in a folder of them."""
    StoreFolder(folder / "store").add_digits()
    (folder / "photos").mkdir()
    for word in ("one", "two", "seven"):
        shutil.copy(DATA / f"{word}.png", folder)
        shutil.copy(DATA / f"{word}.png", folder / "photos")


def shards(folder: Path) -> None:
    """The same, the pictures also in a tar, and a network with another name."""
    digits(folder)
    StoreFolder(folder / "store").add_digits(name="resnet50")
    (folder / "shards").mkdir()
    subprocess.run(["tar", "--create", "--file", "shards/0.tar", "seven.png", "two.png"], cwd=folder, check=True)


def street(folder: Path) -> None:
    """Networks that segment and detect in a store, and a picture."""
    digits(folder)
    (folder / "street.jpg").write_bytes(jpeg())
    add_colours(folder / "store", "fcn", stretched(64, 64))
    boxes = np.array([[0, 0, 32, 32], [8, 8, 60, 60]], np.float32)
    scores = np.array([[0.1, 0.9], [0.2, 0.8]], np.float32)
    said = DetectionOutputs("boxes", "scores", iou_threshold=0.5)
    fixed = (FixedOutput("boxes", boxes), FixedOutput("scores", scores))
    add_detector(folder / "store", "ssd", stretched(64, 64), said, fixed)


def photos(folder: Path) -> None:
    """A folder of pictures for each class, made by the program that another page shows."""
    (program,) = (one.text for one in blocks(ROOT / "docs/your-own-cnn.md") if one.file == "make_photos.py")
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True)


def weights(folder: Path) -> None:
    """A trained network."""
    convoy(folder, "train", "digits", "--arch", "simple_cnn", "--epochs", "5", "--out", "digits.safetensors")


def dashboards(folder: Path) -> None:
    """The program that makes dashboards, which writes beside itself."""
    shutil.copytree(ROOT / "docs" / "deploy", folder / "docs" / "deploy")


def convoy(folder: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "convoy", *arguments], cwd=folder, check=True)


# Of a network that is trained here: what of a page's words and figures must come again.


def about_as_right(shown: str, printed: str) -> None:
    (was, of_what), (is_now, of_what_now) = (
        re.findall(r"^([\d.]+) % (of .* images)", one)[0] for one in (shown, printed)
    )
    assert (float(was), of_what) == (pytest.approx(float(is_now), abs=2.5), of_what_now)


def variants(text: str) -> dict[str, float]:
    """The top-1 by file; BF16 is made only where the processor has it."""
    found = re.findall(r"^(\w[\w-]*\.onnx) .*?([\d.]+) %", text, re.MULTILINE)
    return {file: float(percent) for file, percent in found if file != "bf16.onnx"}


def same_proof(shown: str, printed: str) -> None:
    assert variants(printed) == pytest.approx(variants(shown), abs=2.5)
    said = r"^(?:weights|preprocessing|scores|published).*|Charts: .*|\w+ version 1: \S+,"
    assert [line for line in re.findall(said, shown, re.MULTILINE) if line not in printed] == []


def published(shown: str, printed: str) -> None:
    assert shown.strip().splitlines()[-1] in printed


def same_class(shown: str, printed: str) -> None:
    pattern = r"\S+\.png │ (\w+) +│ (\d+)"
    assert re.findall(pattern, printed)[0] == re.findall(pattern, shown)[0]


def same_answer(shown: str, printed: str) -> None:
    expected, got = json.loads(shown), json.loads(printed)
    assert (got.keys(), got["timing_ms"].keys()) == (expected.keys(), expected["timing_ms"].keys())
    first = expected["predictions"][0]
    assert got["predictions"][0] == {**first, "score": pytest.approx(first["score"], abs=0.1)}


Judge = Callable[[str, str], None]
OWN_CNN: tuple[tuple[str, Judge], ...] = (
    ("python train.py", about_as_right),
    ("convoy export 'my_net.py", same_proof),
    ("convoy export zoo", published),
    ("convoy inspect", same_proof),
    ("convoy predict", same_class),
    ("curl", same_answer),
)


class Scene(NamedTuple):
    """What a page's reader has.

    `ready` makes the folder. `is_served`: the demo is served before the page begins. `env` is for what would take
    minutes otherwise. `codes` are the exit codes that the page allows. `judges`: what commands that begin so print is
    compared by these.
    """

    ready: Callable[[Path], None] = nothing
    is_served: bool = False
    env: tuple[tuple[str, str], ...] = ()
    codes: tuple[int, ...] = (0,)
    judges: tuple[tuple[str, Judge], ...] = ()


# A busy machine voids a load test, which then ends with 1.
_IN_SHORT = (("CONVOY_DURATION", "0.5"),)
LONG = {
    "README.md": Scene(),
    "docs/export.md": Scene(weights),
    "docs/loadtest.md": Scene(is_served=True, env=_IN_SHORT, codes=(0, 1)),
    "docs/training.md": Scene(photos, env=(("CONVOY_EPOCHS", "5"),)),
    "docs/your-own-cnn.md": Scene(judges=OWN_CNN),
}
SCENES = {
    "docs/batch.md": Scene(shards),
    "docs/client.md": Scene(digits, is_served=True),
    "docs/configuration.md": Scene(),
    "docs/deploy/observability/README.md": Scene(dashboards),
    "docs/metrics.md": Scene(is_served=True),
    "docs/protocol.md": Scene(digits, is_served=True),
    "docs/python.md": Scene(street),
    "docs/ray.md": Scene(),
    "docs/serving.md": Scene(digits),
    **LONG,
}


def is_here(said: str) -> bool:
    return not any(re.search(pattern, said) for pattern in NOT_HERE)


def to_type(block: Block) -> list[str]:
    """The commands of a block, or the whole of an example that begins with its imports."""
    page = name_of(block.page)
    if not is_here(page):
        return []
    if block.language == "python":
        stands_alone = block.text.startswith(("import ", "from ")) and not block.file
        return [block.text] if stands_alone and is_here(f"python of {page}: {block.text}") else []
    return [line for line in block.commands if is_here(line)]


def test_every_page_with_something_to_type_is_typed() -> None:
    """A page that is missing here wants a row in SCENES, or its commands a reason in NOT_HERE."""
    assert {name_of(page) for page in PAGES if any(map(to_type, blocks(page)))} == SCENES.keys()


def test_nothing_is_left_out_that_no_page_has() -> None:
    said = [name_of(page) for page in PAGES]
    for block in (block for page in PAGES for block in blocks(page)):
        said += [*block.commands, f"python of {name_of(block.page)}: {block.text}"]
    assert [pattern for pattern in NOT_HERE if not any(re.search(pattern, one) for one in said)] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "page",
    [
        one if one not in LONG else pytest.param(one, marks=[pytest.mark.long, pytest.mark.timeout(900)])
        for one in SCENES
    ],
)
def test_what_the_page_says_can_be_typed(page: str, tmp_path: Path) -> None:
    scene = SCENES[page]
    scene.ready(tmp_path)
    for block in blocks(ROOT / page):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    with ExitStack() as stack:
        reader = Reader(tmp_path, scene, stack)
        if scene.is_served:
            reader.serve([])
        for block in blocks(ROOT / page):
            if block.language == "python":
                for example in to_type(block):
                    run_example(reader.here(example), tmp_path)
                continue
            for line in to_type(block):
                shown = block.shown if line == block.commands[-1] else ""
                printed = reader.type(line, shown)
                if shown:
                    next((own for begin, own in scene.judges if line.startswith(begin)), as_shown)(shown, printed)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_block_of_the_readme_can_be_pasted(tmp_path: Path) -> None:
    """All commands at once, the server in the background."""
    (block,) = (one for one in blocks(ROOT / "README.md") if "convoy serve" in one.text)
    with ExitStack() as stack:
        reader = Reader(tmp_path, Scene(), stack)
        printed = reader.paste(block.text)
    assert '"predictions":[{"class_id":7,"label":"7"' in printed, printed
    assert re.search(r"good answers +│ +[1-9]\d+ ", printed), printed
    assert re.search(r"failed +│ +0 ", printed), printed


def as_shown(shown: str, printed: str) -> None:
    """What is printed may have other fractions, anything in the place of `...`, and other spaces and ends of lines."""
    pattern = re.escape(" ".join(shown.split())).replace(re.escape("..."), ".*")
    assert re.fullmatch(re.sub(r"\d+(?:\\\.\d+)+", r"[\\d.]+", pattern), " ".join(printed.split())), printed


class Reader:
    """Types commands in a folder, and has the server that was started last."""

    def __init__(self, folder: Path, scene: Scene, stack: ExitStack) -> None:
        self._folder, self._scene = folder, scene
        self._servers = stack.enter_context(ExitStack())
        self._server: Server | None = None
        programs = folder / ".venv" / "bin"
        programs.mkdir(parents=True)
        for name, module in (("convoy", " -m convoy"), ("python", "")):
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable}{module} "$@"\n')
            (programs / name).chmod(0o755)
        (folder / "tests").mkdir()
        (folder / "tests" / "data").symlink_to(DATA)
        (folder / ".curlrc").write_text('silent\nshow-error\nwrite-out = "%{stderr}%{http_code}\\n"\n')
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CONVOY_")}
        self._env = {**inherited, "HOME": str(folder), "PATH": f"{programs}:{os.environ['PATH']}"}
        self._env |= {"COLUMNS": "80", **dict(scene.env)}

    def type(self, command: str, shown: str) -> str:
        """What the command prints. A server is started and goes on.

        What curl asks is a 200, where the page does not show another status or an error.
        """
        if parts(command)[0][:2] == ["make", "serve"]:
            # Below another make it would tell of folders, too.
            quiet = ["make", "--dry-run", "--no-print-directory", "serve"]
            recipe = subprocess.run(quiet, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
            command = recipe[-1]
        if parts(command)[0][:2] == ["convoy", "serve"]:
            self.serve(parts(command)[0][2:])
            return ""
        done = subprocess.run(
            ["bash", "-c", self.here(command)],
            *(), cwd=self._folder, env=self._env, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        failure = f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert done.returncode in self._scene.codes, failure
        assert done.returncode == 0 or done.stdout, failure  # a run that was judged, not one that could not begin
        if "curl" in [words[0] for words in parts(command)]:
            (status,) = re.findall(r"^\d{3}$", done.stderr, re.MULTILINE)
            said = re.match(r"HTTP/\S+ (\d{3})", shown)
            assert status == said[1] if said else (status != "200") == shown.startswith('{"error"'), (command, status)
        return done.stdout

    def paste(self, text: str) -> str:
        """What a whole block prints that serves in the background; ports of its own replace the page's."""
        port, grpc_port = free_port(), free_port()
        env = {**self._env, "CONVOY_PORT": f"{port}", "CONVOY_GRPC_PORT": f"{grpc_port}"}
        env |= {"CONVOY_URL": f"http://127.0.0.1:{port}", "CONVOY_DURATION": "3"}
        pasted = f"{text.replace('localhost:8000', f'127.0.0.1:{port}')}\nkill %1; wait"
        done = subprocess.run(
            ["bash", "-c", pasted],
            *(), cwd=self._folder, env=env, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        return done.stdout + done.stderr

    def serve(self, options: list[str]) -> None:
        """Start `convoy serve` in the place of the server that runs; paths are those of the folder."""
        self._servers.close()
        kept: list[str] = []
        store = None
        left = iter(options)
        for word in left:
            if word in ("--port", "--grpc-port"):
                next(left)
            elif word == "--store":
                store = self._folder / next(left)
            else:
                kept.append(str(self._folder / word) if (self._folder / word).exists() else word)
        self._server = self._servers.enter_context(start_server(*kept, store=store))
        self._env["CONVOY_URL"] = self._server.url

    def here(self, said: str) -> str:
        """With the ports of the server that runs in the place of the page's."""
        if self._server is None:
            return said
        said = re.sub(r"(localhost|127\.0\.0\.1):8000", rf"127.0.0.1:{self._server.port}", said)
        return said.replace("localhost:8001", self._server.grpc_address) if ":8001" in said else said
