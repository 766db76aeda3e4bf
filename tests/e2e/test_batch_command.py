"""`convoy batch` labels as a server does, from every kind of input, and goes on where it was killed."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from rich.console import Console

from convoy.app.batch.command import run
from convoy.app.batch.inputs import BatchInputs, images_of
from convoy.app.batch.job import BatchOptions
from convoy.app.batch.results import ERRORS, RUN_FILE
from convoy.models.errors import ConvoyError, ImageError, JobError
from convoy.models.store import disk_errors
from tests.support.pictures import assortment
from tests.support.servers import check_ended, run_convoy, start_server, wait_until
from tests.support.stores import ROOT, StoreFolder, digit

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ENGINE = ("--engine", "cpu", "--precision", "fp32")


def batch(*arguments: object, code: int = 0) -> str:
    """What it says; both streams."""
    done = run_convoy("batch", *map(str, arguments), timeout_s=240)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def rows(out: Path) -> dict[str, dict[str, Any]]:
    """Every row by its path, each path once."""
    found = [row for part in sorted(out.glob("part-*.parquet")) for row in pq.read_table(part).to_pylist()]
    by_path = {row["path"]: row for row in found}
    assert len(by_path) == len(found), "a row is doubled"
    return by_path


def errors(out: Path) -> dict[str, str]:
    return {row["path"]: row["error"] for row in pq.read_table(out / ERRORS).to_pylist()}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for name, encoded in assortment().items():
        (folder / name).write_bytes(encoded)
    (folder / "notes.md").write_text("not an image")
    return folder


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Ten times ten, in folders."""
    for number in range(100):
        place = tmp_path / "digits" / str(number // 10)
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:03d}.png").write_bytes(digit(WORDS[number % 10]))
    return tmp_path / "digits"


def test_it_answers_as_a_server_does(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    batch("digits", images, "--out", out, "--top-k", 3, "--embeddings", "logits", *ENGINE)
    labelled, unreadable = rows(out), errors(out)
    assert len(labelled) + len(unreadable) == len(assortment())
    with start_server("--precision", "fp32") as server:
        for name, encoded in assortment().items():
            answer = server.post("/predictions/digits?top_k=3", content=encoded).json()
            path = f"{images}/{name}"
            if "error" in answer:
                assert unreadable[path] == answer["error"]
                continue
            row = labelled[path]
            assert row["class_ids"] == [one["class_id"] for one in answer["predictions"]]
            assert row["labels"] == [one["label"] for one in answer["predictions"]]
            assert row["scores"] == pytest.approx([one["score"] for one in answer["predictions"]], abs=1e-5)
            assert len(row["embeddings"]) == 10
            assert row["embeddings"].index(max(row["embeddings"])) == row["class_ids"][0]


def test_every_kind_of_input_is_read(digits: Path, tmp_path: Path) -> None:
    files = sorted(digits.rglob("*.png"))
    encoded = [file.read_bytes() for file in files]
    (tmp_path / "list.txt").write_text("\n".join(map(str, files)) + "\n\n")
    with tarfile.open(tmp_path / "shard.tar", "w") as shard:
        for file in files:
            shard.add(file, f"{'long/' * 30}{file.name}")
            label = tarfile.TarInfo(f"{file.stem}.cls")
            label.size = 1
            shard.addfile(label, io.BytesIO(b"0"))
    tables = {
        "paths": pa.table({"path": [str(file) for file in files], "label": [0] * len(files)}),
        "bytes": pa.table({"image": encoded, "name": [file.name for file in files]}),
        "struct": pa.table({"image": [{"bytes": one, "path": f"p{n:03d}"} for n, one in enumerate(encoded)]}),
    }
    for name, table in tables.items():
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=7)
    given = {
        str(digits): [str(file) for file in files],
        str(tmp_path / "list.txt"): [str(file) for file in files],
        f"{digits}/*/*.png": [str(file) for file in files],
        str(tmp_path / "shard.tar"): [f"{tmp_path}/shard.tar/{'long/' * 30}{file.name}" for file in files],
        str(tmp_path / "paths.parquet"): [str(file) for file in files],
        str(tmp_path / "struct.parquet"): [f"p{number:03d}" for number in range(100)],
        str(tmp_path / "bytes.parquet"): [f"{tmp_path}/bytes.parquet#{number}" for number in range(100)],
    }
    inputs = BatchInputs(list(given))
    assert inputs.images == 700
    assert inputs.digest("/") == BatchInputs(list(given)).digest("/")
    for part_images in (16, 64, 1024):  # parts go from one kind into the next
        parts = inputs.parts(part_images, "/")
        assert [part.number for part in parts] == list(range(-(-700 // part_images)))
        found = [image for part in parts for image in images_of(part)]
        assert [image.path for image in found] == [path for paths in given.values() for path in paths]
        assert [image.read() for image in found] == encoded * len(given)
    assert [image.place for image in images_of(parts[0])] == list(range(700))
    pq.write_table(pa.table({"image": pa.array([None, b"x"])}), tmp_path / "null.parquet")
    (first, _) = images_of(BatchInputs([str(tmp_path / "null.parquet")]).parts(8, "/")[0])
    with pytest.raises(ImageError, match="the row has no image"):
        first.read()
    with (tmp_path / "shard.tar").open("r+b") as shard_file:
        shard_file.truncate(100_000)
    (part,) = BatchInputs([str(tmp_path / "list.txt")]).parts(100, "/")
    assert len(list(images_of(part))) == 100
    with pytest.raises(JobError, match="can no longer be read"):
        list(images_of(inputs.parts(1024, "/")[0]))


def refused(options: BatchOptions) -> ConvoyError:
    with pytest.raises(ConvoyError) as caught:
        run(options, Console(file=io.StringIO()))
    assert "\n" not in str(caught.value)
    return caught.value


def test_wrong_calls_are_told_in_a_line(digits: Path, tmp_path: Path, store: StoreFolder) -> None:
    out = tmp_path / "out"
    store.add_identity("FP32")
    (tmp_path / "broken.tar").write_bytes(b"no tar" * 500)
    (tmp_path / "broken.parquet").write_bytes(b"no parquet")
    (tmp_path / "shard.tar.gz").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin.txt").write_bytes(b"\xe4\xf6")
    pq.write_table(pa.table({"label": [1]}), tmp_path / "numbers.parquet")
    pq.write_table(pa.table({"a": ["x"], "b": ["y"]}), tmp_path / "several.parquet")
    right = BatchOptions("digits", (str(digits),), out)

    def of(source: str) -> BatchOptions:
        return replace(right, inputs=(str(tmp_path / source),))

    wrong: list[tuple[int, str, BatchOptions]] = [
        (2, "there is no model 'nobody'", replace(right, name="nobody")),
        (2, "there is no ", of("nowhere.txt")),
        (2, "nothing matches", replace(right, inputs=(f"{digits}/*.bmp",))),
        (2, "no images found in", of("empty")),
        (2, "cannot be read", of("latin.txt")),
        (2, "unpack it to a .tar", of("shard.tar.gz")),
        (1, "cannot be read as a tar", of("broken.tar")),
        (1, "cannot be read as parquet", of("broken.parquet")),
        (2, "no column of paths", of("numbers.parquet")),
        (2, "choose one with --column", of("several.parquet")),
        (2, "has no column 'c'", replace(of("several.parquet"), column="c")),
        (2, "has no version 7", replace(right, model_version=7)),
        (2, "has no output 'x'", replace(right, embeddings="x")),
        (2, "--top-k must be at least 1", replace(right, top_k=0)),
        (2, "above the model's own limit", replace(right, batch_size=100_000)),
        (2, "--engine: choose from", replace(right, engine="abacus")),
        (1, "is a bare model", replace(right, name="identity_fp32", store=store.root)),
    ]
    for code, words, options in wrong:
        error = refused(options)
        assert words in str(error), error
        assert error.exit_code == code, error
    assert not list(out.glob("part-*"))
    (tmp_path / "file").touch()
    assert "is a file" in str(refused(replace(right, out=tmp_path / "file")))
    said = batch("digits", tmp_path / "nowhere", "--out", out, code=2)
    assert said.startswith("convoy: there is no ")


def test_one_folder_is_for_one_run(digits: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    own = BatchOptions("digits", (str(digits),), out, engine="cpu", precision="fp32")
    batch("digits", digits, "--out", out, *ENGINE)
    before = {part: part.stat().st_mtime_ns for part in out.glob("part-*")}
    assert run(replace(own, workers=2, batch_size=8), Console(file=io.StringIO())) == 0
    assert {part: part.stat().st_mtime_ns for part in out.glob("part-*")} == before
    assert "--top-k was 5 and is 2" in str(refused(replace(own, top_k=2)))
    (digits / "0" / "more.png").write_bytes(digit("one"))
    assert "the list of inputs changed, number of images was 100 and is 101" in str(refused(own))
    (digits / "0" / "more.png").unlink()
    (out / RUN_FILE).unlink()
    assert "parquet files of an unknown run" in str(refused(own))


def test_where_no_image_can_be_read_the_job_failed(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.jpg").write_bytes(b"nothing")
    batch("digits", tmp_path, "--out", tmp_path / "out", *ENGINE, code=1)
    assert len(errors(tmp_path / "out")) == 3
    assert rows(tmp_path / "out") == {}


def test_a_full_disk_is_told(digits: Path, tmp_path: Path) -> None:
    """Of a process whose files may not grow; the kernel's answer to a full disk is one of the same kind."""
    with pytest.raises(JobError, match="is full; free some space"), disk_errors(tmp_path):
        raise OSError(28, "No space left on device")
    if not Path("/dev/full").exists() or os.geteuid() != 0:
        pytest.skip("needs a small disk of its own")
    small = tmp_path / "small"
    small.mkdir()
    script = (
        f"mount -t tmpfs -o size=8k none {small} && "
        f"exec {sys.executable} -m convoy batch digits {digits} --out {small} --engine cpu --embeddings logits"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("needs a small disk of its own")
    check_ended(done, 1, "is full; free some space and run the command again")


# Kill -9


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    large = {word: enlarged(digit(word)) for word in WORDS}  # what takes a while
    for number in range(640):
        (folder / f"{number:05d}.png").write_bytes(large[WORDS[number % 10]] if number % 200 else b"broken")
    return folder


def enlarged(encoded: bytes) -> bytes:
    out = io.BytesIO()
    Image.open(io.BytesIO(encoded)).convert("RGB").resize((400, 400)).save(out, "PNG")
    return out.getvalue()


def check_all(out: Path, many: Path) -> None:
    labelled = rows(out)
    assert len(labelled) == 636
    assert errors(out).keys() == {f"{many}/{number:05d}.png" for number in range(0, 640, 200)}
    for number in range(640):
        if number % 200:
            assert labelled[f"{many}/{number:05d}.png"]["labels"][0] == str(number % 10)
    assert not list(out.glob(".writing-*"))


@contextmanager
def begun(many: Path, out: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A run that has written its first part and has others to write."""
    command = [sys.executable, "-m", "convoy", "batch", "digits", str(many), "--out", str(out), *ENGINE, *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        try:
            wait_until(lambda: next(out.glob("part-*.parquet"), None), "the first part is there", 120)
            yield running
        finally:
            running.kill()


def stopped_workers(process: int) -> list[psutil.Process]:
    """Its workers, which do nothing until they are told to go on."""
    found = []
    for one in psutil.Process(process).children():
        with suppress(psutil.NoSuchProcess):  # it has just died
            if "convoy.app.batch.worker" in one.cmdline():
                one.suspend()
                found.append(one)
    return found


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_nothing(many: Path, tmp_path: Path) -> None:
    with begun(many, tmp_path / "out", "--workers", "2") as running:
        first, *others = stopped_workers(running.pid)
        first.kill()
        for one in others:
            one.resume()
        said, _ = running.communicate(timeout=200)
    assert running.returncode == 0, said
    check_all(tmp_path / "out", many)


@pytest.mark.slow
def test_a_killed_command_goes_on(many: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with begun(many, out) as running:
        workers = stopped_workers(running.pid)
        assert "another convoy batch is writing to" in batch("digits", many, "--out", out, *ENGINE, code=1)
        running.kill()
        running.wait()
        for one in workers:
            one.resume()
        wait_until(lambda: not any(map(is_alive, workers)), "its workers end by themselves")
    assert 0 < len(list(out.glob("part-*.parquet"))) < 10
    assert "resuming" in batch("digits", many, "--out", out, "--workers", 2, *ENGINE)
    check_all(out, many)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_told_to_end_says_how_to_go_on(many: Path, tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    with begun(many, out) as running:
        workers = stopped_workers(running.pid)
        running.send_signal(number)
        said, _ = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "run the same command to resume" in said
    assert not any(map(is_alive, workers))
    assert (out / ERRORS).exists()
    batch("digits", many, "--out", out, *ENGINE)
    check_all(out, many)


@pytest.mark.slow
def test_workers_that_die_again_and_again_end_the_run(many: Path, tmp_path: Path) -> None:
    with begun(many, tmp_path / "out", "--workers", "1") as running:

        def killed_again() -> bool:
            for one in stopped_workers(running.pid) if running.poll() is None else ():
                one.kill()
            return running.poll() is not None

        wait_until(killed_again, "it gives up", 60)
        said, _ = running.communicate()
    assert running.returncode == 1
    assert "workers keep dying, the last one was killed by SIGKILL" in said


# Ray


@pytest.mark.long
@pytest.mark.timeout(600)
def test_on_ray_as_here_and_after_kill_9(many: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    out = tmp_path / "out"
    with begun(many, out, "--ray", "local", "--workers", "1") as running:
        family = psutil.Process(running.pid).children(recursive=True)
        (actor,) = [one for one in family if any("RayLabeller" in word for word in one.cmdline())]
        actor.kill()
        before = len(list(out.glob("part-*.parquet")))
        wait_until(lambda: len(list(out.glob("part-*.parquet"))) > before + 1, "another one labels", 200)
        family = psutil.Process(running.pid).children(recursive=True)
        running.kill()
        for one in family:
            if one.is_running():
                one.kill()
        running.wait()
    batch("digits", many, "--out", out, "--ray", "local", *ENGINE)
    check_all(out, many)
    identity = json.loads((out / RUN_FILE).read_text())["identity"]
    assert identity["images"] == 640
