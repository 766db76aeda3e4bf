"""The documents' commands and examples, typed page by page, in the order in which they stand, in one folder.

SCENES says what a page's reader has before the first command, where that is more than a served demo and some pictures.
What cannot be typed here has a row in NOT_HERE with the reason. A server that a command starts runs until the next one
is started or the page ends, on ports of its own instead of the page's. What a page shows behind a command must be what
is printed, its fractions aside.
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
from PIL import Image

from convoy.models.answers import Mask
from convoy.models.tasks import DetectionOutputs
from tests.support.annotated_images import pictures, write_box_finder, write_coco
from tests.support.certificates import Authority
from tests.support.detector_files import METADATA, SIDE, STRIDE, write_detector
from tests.support.documents import PAGES, Block, all_blocks, blocks, name_of, parts, run_example
from tests.support.load_records import load_record
from tests.support.pictures import jpeg, saved
from tests.support.servers import Server, free_port, start_server, wait_until
from tests.support.signing_keys import KeyPair, sign
from tests.support.stores import DATA, ROOT, StoreFolder
from tests.support.task_models import FixedOutput, add_colours, add_detector, stretched

# A pattern of what is not typed here (in a command, in an example behind `python of PAGE: `, or of a page), and why.
NOT_HERE = {
    r"^docker ": "needs Docker; tests/image builds the image and runs it",
    r"^kubectl ": "needs a cluster; test_deploy.py gives the same files to kubectl",
    r" --ray$": "needs Ray; test_batch_command.py labels on it, among the long tests",
    r"^serve run ": "needs Ray; test_ray_serve.py deploys the same application, among the long tests",
    r"^python of docs/ray\.md: ": "needs Ray; test_ray_serve.py has the same calls",
    r"pip (install|download|wheel) ": "needs a registry, and would change the environment of the tests",
    r" s3://": "needs S3; test_remote_serving.py serves from moto's",
    r"torchvision:": "needs published weights, 100 MB",
    r"^convoy serve (--store store )?--require-signature ": "serves such an export; test_signed_served.py",
    r"^yolo export ": "needs Ultralytics and weights; test_yolo_ultralytics.py exports with it, among the long tests",
    r"^make (test|peers|gpu-proof)\b": "these tests themselves, hours, or a GPU",
    r"^python -m (convoy\.loadtest\.peers|tests\.simulation\.against_server)\b": "needs hours on a quiet machine",
    r"^python -m tests\.gpu\.proof": "needs a GPU, or a registry; test_gpu_proof.py and test_gpu_pack.py",
    r"^python of docs/client\.md: [^$]*https://models": "test_tls_served.py runs it with certificates",
    r"^docs/demo\.md$": "test_demo_whole.py has `make demo` type the whole page",
}


def nothing(folder: Path) -> None:
    """The reader has an empty folder."""


def digits(folder: Path) -> None:
    """The demo in a store, which is /models as well, and pictures of digits: some here, some in a folder of them."""
    for store in ("store", "models"):
        StoreFolder(folder / store).add_digits()
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


def signed(folder: Path) -> None:
    """A bundle to sign."""
    digits(folder)
    StoreFolder(folder / "store").add_digits(name="resnet18")


def certified(folder: Path) -> None:
    """The files of a server's operator: certificates, keys, and a signed store."""
    digits(folder)
    authority = Authority(folder, "ca")
    for (cert, key), name in ((authority.sign("server"), "tls"), (authority.sign("client"), "client")):
        cert.rename(folder / f"{name}.crt")
        key.rename(folder / f"{name}.key")
    for name in ("ca.crt", "clients.crt"):
        shutil.copy(authority.file, folder / name)
    pair = KeyPair(folder, "models")
    sign(folder / "models" / "digits" / "1", pair)
    pair.public.rename(folder / "models.pub.pem")
    (folder / "team-a.key").write_text("secret\n")
    (folder / "convoy.yaml").write_text(f"keys: {{team-a: {folder / 'team-a.key'}}}\n")


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


def yolo(folder: Path) -> None:
    """Files with Ultralytics' metadata, whose networks find red cells, and a picture with one."""
    said = METADATA | {"names": "{0: 'person', 1: 'bicycle'}"}
    write_detector(folder / "yolo11n.onnx", metadata=said)
    write_detector(folder / "yolo11n-seg.onnx", "yolo_v8_seg", said | {"task": "segment"})
    write_detector(folder / "yolo11n-pose.onnx", "yolo_v8_pose", said | {"task": "pose", "kpt_shape": "[2, 3]"})
    picture = Image.new("RGB", (640, 480), (90, 90, 90))
    picture.paste("red", (160, 240, 240, 320))
    (folder / "street.jpg").write_bytes(saved(picture, "JPEG", quality=95, subsampling=0))
    for part in ("train", "val"):
        for kind in ("images", "labels"):
            (folder / "coco128" / kind / part).mkdir(parents=True)
        for number in range(16):
            column, row, label = (number + (part == "val")) % 8, number // 2, number % 2
            image = Image.new("RGB", (SIDE, SIDE), (90, 90, 90 + number))
            box = (column * STRIDE, row * STRIDE, (column + 1) * STRIDE, (row + 1) * STRIDE)
            image.paste("blue" if label else "red", box)
            image.save(folder / "coco128/images" / part / f"{number}.png")
            line = f"{label} {(column + 0.5) / 8} {(row + 0.5) / 8} 0.125 0.125\n"
            (folder / "coco128/labels" / part / f"{number}.txt").write_text(line)
    (folder / "coco128/data.yaml").write_text("train: images/train\nval: images/val\nnames: [person, bicycle]\n")


def photos(folder: Path) -> None:
    """A folder of pictures for each class, made by the program that another page shows."""
    (program,) = (one.text for one in blocks(ROOT / "docs/your-own-cnn.md") if one.file == "make_photos.py")
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True)


def configured(folder: Path) -> None:
    """The files that the page's file names."""
    digits(folder)
    (folder / "team-a.key").write_text("secret\n")


def runs(folder: Path) -> None:
    """The files of two load tests."""
    digits(folder)
    for name in ("before", "after"):
        load_record(folder, name)


def weights(folder: Path) -> None:
    """A trained network, the files of a network for signals, and a detector with annotated images."""
    (folder / "net.py").write_text(SIGNALS)
    (folder / "scores.py").write_text("def close(outputs, targets):\n    return -abs(outputs[:, 0] - targets)\n")
    random = np.random.default_rng(0)
    for name in ("ecg", "test"):
        signal, age = random.standard_normal((40, 2, 1000), np.float32), random.integers(0, 90, (40, 1))
        np.savez(folder / f"{name}.npz", signal=signal, age=age, targets=np.zeros(40, np.float32))
    subprocess.run([sys.executable, "net.py"], cwd=folder, check=True)
    write_box_finder(folder / "detector.onnx")
    shown = pictures(60)
    write_coco(folder / "coco", shown[:30], "train")
    write_coco(folder / "coco", shown[30:], "val")
    convoy(folder, "train", "digits", "--arch", "simple_cnn", "--epochs", "5", "--out", "digits.safetensors")


# A network that takes a signal, with or without an age; running the file saves its weights and its graph.
SIGNALS = """
import torch
from safetensors.torch import save_file
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(2, 8, 9, 4), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
        self.head = nn.Linear(8, 3)

    def forward(self, signal, age=None):
        scores = self.head(self.features(signal))
        return scores if age is None else scores + age / 100

make = Net

if __name__ == "__main__":
    net = Net().eval()
    save_file(net.state_dict(), "ecg.safetensors")
    given = (torch.zeros(2, 2, 1000), torch.zeros(2, 1, dtype=torch.int64))
    batch = torch.export.Dim("batch")
    shapes = ({0: batch}, {0: batch})
    torch.onnx.export(net, given, "ecg.onnx", dynamo=True, dynamic_shapes=shapes, input_names=["signal", "age"])
"""


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


def same_understanding(shown: str, printed: str) -> None:
    """Each line's subject, and the options that change it."""
    said = r"^(\w+): .*?(\(--.*\))$"
    assert re.findall(said, shown, re.MULTILINE) == re.findall(said, printed, re.MULTILINE)


def same_boxes(shown: str, printed: str) -> None:
    expected, got = json.loads(shown), json.loads(printed)
    assert (got.keys(), got["timing_ms"].keys()) == (expected.keys(), expected["timing_ms"].keys())
    for one, other in zip(got["detections"], expected["detections"], strict=True):
        assert (one["class_id"], one["label"]) == (other["class_id"], other["label"])
        assert one["score"] == pytest.approx(other["score"], abs=0.02)
        assert one["box"] == pytest.approx(other["box"], abs=1)
        masks = [
            Mask(*shape["size"], shape["counts"]).array() for shape in (one.get("mask"), other.get("mask")) if shape
        ]
        assert len(masks) != 1
        assert not masks or (masks[0] != masks[1]).sum() < 0.05 * masks[1].sum()


Judge = Callable[[str, str], None]
OWN_CNN: tuple[tuple[str, Judge], ...] = (
    ("python train.py", about_as_right),
    ("convoy export 'my_net.py", same_proof),
    ("convoy export zoo", published),
    ("convoy predict", same_class),
    ("curl", same_answer),
)

YOLO: tuple[tuple[str, Judge], ...] = (("convoy export", same_understanding), ("curl", same_boxes))


class Scene(NamedTuple):
    """What a page's reader has.

    `ready` makes the folder. `is_served`: the demo is served before the page begins, with the options `serve`. `env`
    is for what would take minutes otherwise. `codes` are the exit codes that the page allows. `judges`: what commands
    that begin so print is compared by these. `program` is what Python runs as `convoy`.
    """

    ready: Callable[[Path], None] = digits
    is_served: bool = True
    serve: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    codes: tuple[int, ...] = (0,)
    judges: tuple[tuple[str, Judge], ...] = ()
    program: str = "-m convoy"


# A busy machine voids a load test, which then ends with 1.
_IN_SHORT = (("CONVOY_DURATION", "0.5"),)
LONG = {
    "README.md": Scene(nothing, is_served=False),
    "docs/export.md": Scene(weights, is_served=False),
    "docs/loadtest.md": Scene(runs, env=_IN_SHORT, codes=(0, 1)),
    "docs/precisions.md": Scene(weights, is_served=False),
    "docs/training.md": Scene(photos, is_served=False, env=(("CONVOY_EPOCHS", "5"),)),
    "docs/your-own-cnn.md": Scene(nothing, is_served=False, judges=OWN_CNN),
}
SCENES = {
    "SECURITY.md": Scene(certified, is_served=False),
    "docs/batch.md": Scene(shards, is_served=False),
    "docs/bundles.md": Scene(signed, is_served=False),
    "docs/client.md": Scene(street, serve=("--store", "store")),
    "docs/configuration.md": Scene(configured, is_served=False),
    "docs/deploy/observability/README.md": Scene(dashboards, is_served=False),
    "docs/python.md": Scene(street, is_served=False),
    "docs/serving.md": Scene(certified, is_served=False),
    "docs/yolo.md": Scene(yolo, is_served=False, judges=YOLO, program=f"-P {ROOT}/tests/support/quick_convoy.py"),
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


TYPED = [name_of(page) for page in PAGES if any(map(to_type, blocks(page)))]


def test_every_scene_is_of_a_page_with_something_to_type() -> None:
    assert SCENES.keys() - set(TYPED) == set()


def test_nothing_is_left_out_that_no_page_has() -> None:
    said = [name_of(page) for page in PAGES]
    for block in (block for page in PAGES for block in blocks(page)):
        said += [*block.commands, f"python of {name_of(block.page)}: {block.text}"]
    assert [pattern for pattern in NOT_HERE if not any(re.search(pattern, one) for one in said)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            one, marks=[pytest.mark.long, pytest.mark.timeout(900)] if one in LONG else pytest.mark.timeout(300)
        )
        for one in TYPED
    ],
)
def test_what_the_page_says_can_be_typed(page: str, tmp_path: Path) -> None:
    scene = SCENES.get(page, Scene())
    scene.ready(tmp_path)
    for block in blocks(ROOT / page):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    with ExitStack() as stack:
        reader = Reader(tmp_path, scene, stack)
        if scene.is_served:
            reader.serve([*scene.serve])
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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
@pytest.mark.parametrize(
    "block", [one for one in all_blocks() if one.language == "javascript"], ids=lambda one: name_of(one.page)
)
def test_javascript_of_a_page_runs(block: Block, tmp_path: Path) -> None:
    with start_server() as server:
        code = block.text.replace("http://localhost:8000", server.url)
        assert code != block.text
        run_example(code, tmp_path, ("node", "--input-type=module", "--eval"))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_block_of_the_readme_can_be_pasted(tmp_path: Path) -> None:
    """All commands at once, the server in the background."""
    (block,) = (one for one in blocks(ROOT / "README.md") if "convoy serve" in one.text)
    with ExitStack() as stack:
        reader = Reader(tmp_path, Scene(), stack)
        printed = reader.paste(block.text)
    assert '"predictions":[{"class_id":7,"label":"7"' in printed, printed
    assert re.search(r"successful +│ +[1-9]\d+ ", printed), printed
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
        for name, module in (("convoy", scene.program), ("model_signing", "-m model_signing"), ("python", "")):
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
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
        """Start `convoy serve` instead of the server that runs; all paths are those of the folder."""
        self._servers.close()
        kept: list[str] = []
        left = iter(options)
        for word in left:
            if word in ("--port", "--grpc-port"):
                next(left)
                continue
            kept.append(Path(word).name if word.startswith("/") else word)
        wants_certificates = "--tls-client-ca-file" in kept
        env = {"OTEL_SDK_DISABLED": "true"}  # no collector is here
        started = start_server(*kept, env=env, wait_ready=not wants_certificates, cwd=self._folder)
        self._server = server = self._servers.enter_context(started)
        if wants_certificates:
            wait_until(lambda: "ready: " in server.log_so_far, "the server is ready")
        self._env["CONVOY_URL"] = self._server.url

    def here(self, said: str) -> str:
        """With the ports of the server that runs in the place of the page's."""
        if self._server is None:
            return said
        said = re.sub(r"(localhost|127\.0\.0\.1):8000", rf"127.0.0.1:{self._server.port}", said)
        return said.replace("localhost:8001", self._server.grpc_address) if ":8001" in said else said
