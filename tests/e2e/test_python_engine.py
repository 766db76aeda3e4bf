"""`convoy.Engine` answers what a real server answers, from threads, from loops, and when something is lost."""

from __future__ import annotations

import asyncio
import io
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from PIL import Image
from tritonclient.utils import InferenceServerException

import convoy
from convoy.app.core import Core
from convoy.app.python import inside
from convoy.models.errors import (
    DeadlineExceeded,
    ImageError,
    InvalidRequest,
    JobError,
    ModelFailed,
    NotFound,
    Overloaded,
    Unavailable,
    UsageError,
)
from convoy.models.images import preprocess
from tests.support.fake_server import DIE, POISON, Fakes
from tests.support.pictures import assortment
from tests.support.servers import Server, run_convoy, start_server, wait_until
from tests.support.stores import DATA, ROOT, StoreFolder, digit


@pytest.fixture(scope="module")
def filled_store(shared_store: StoreFolder) -> StoreFolder:
    shared_store.add_digits()
    shared_store.add_shift(1.0, 1)
    shared_store.add_shift(2.0, 2)
    for dtype in ("FP32", "FP16", "BF16", "INT64", "BOOL", "BYTES"):
        shared_store.add_identity(dtype)
    return shared_store


@pytest.fixture(scope="module")
def server(filled_store: StoreFolder) -> Iterator[Server]:
    with start_server("--version-policy", "all", store=filled_store.root) as server:
        yield server


@pytest.fixture(scope="module")
def engine(filled_store: StoreFolder) -> Iterator[convoy.Engine]:
    with convoy.Engine(filled_store.root, engine="cpu", version_policy="all") as engine:
        yield engine


def told(result: convoy.Classification) -> list[dict[str, Any]]:
    return [
        {"class_id": one.class_id, "label": one.label, "score": pytest.approx(one.score, abs=1e-6)}
        for one in result.predictions
    ]


# The same answers


@pytest.mark.parametrize("name", assortment())
def test_an_image_in_any_form_is_answered_as_over_http(
    engine: convoy.Engine, server: Server, tmp_path: Path, name: str
) -> None:
    encoded = assortment()[name]
    (tmp_path / name).write_bytes(encoded)
    answer = server.post("/predictions/digits?top_k=3", content=encoded)
    forms: list[Any] = [encoded, bytearray(encoded), memoryview(encoded), tmp_path / name, str(tmp_path / name)]
    if answer.status_code == 200:
        forms.append(Image.open(io.BytesIO(encoded)))
    for form in forms:
        if answer.status_code == 200:
            result = engine.predict("digits", form, top_k=3)
            assert told(result) == answer.json()["predictions"], type(form)
            assert (result.model, result.version, result.error) == ("digits", 1, None)
        else:
            with pytest.raises(ImageError) as caught:
                engine.predict("digits", form, top_k=3)
            assert str(caught.value) == answer.json()["error"]


def test_pixels_are_answered_as_their_file(engine: convoy.Engine) -> None:
    seven = Image.open(io.BytesIO(digit("seven")))
    as_file = engine.predict("digits", digit("seven"))
    grey, colour = np.asarray(seven.convert("L")), np.asarray(seven.convert("RGB"))
    for pixels in (grey, grey[:, :, None], colour, np.asarray(seven.convert("RGBA")), np.asfortranarray(colour)):
        assert engine.predict("digits", pixels).predictions == as_file.predictions


@pytest.mark.parametrize(
    ("pixels", "words"),
    [
        (np.zeros((8, 8), np.float32), "got float32 [8, 8]"),
        (np.zeros((3, 8, 8), np.uint8), "maybe the channels come first"),
        (np.zeros((2, 8, 8, 3), np.uint8), "give several as a list"),
        (np.zeros((0, 8, 3), np.uint8), "no pixels"),
        (Image.new("RGB", (0, 4)), "no pixels"),
        (Image.new("F", (4, 4)), "floating-point"),
        (Image.new("RGB", (5000, 4)), "at most 100 times"),
    ],
)
def test_pixels_that_are_no_image_are_refused_in_words(engine: convoy.Engine, pixels: Any, words: str) -> None:
    with pytest.raises(ImageError, match=re.escape(words)):
        engine.predict("digits", pixels)


def test_of_several_images_each_has_its_answer_or_its_error(
    engine: convoy.Engine, server: Server, tmp_path: Path
) -> None:
    images = assortment()
    for name, encoded in images.items():
        (tmp_path / name).write_bytes(encoded)
    results = engine.predict("digits", (tmp_path / name for name in (*images, "missing.png")))
    answers = [server.post("/predictions/digits", content=encoded).json() for encoded in images.values()]
    assert len(results) == len(answers) + 1
    for result, answer in zip(results, answers, strict=False):
        # In other batches the last bits may differ.
        expected = answer.get("predictions", [])
        got = [{**vars_of(one), "score": pytest.approx(one.score, abs=1e-3)} for one in result.predictions]
        assert got == expected
        assert (str(result.error) if result.error else None) == answer.get("error")
    assert "missing.png: No such file or directory" in str(results[-1].error)
    with pytest.raises(ImageError):
        _ = results[-1].best


def vars_of(prediction: convoy.Prediction) -> dict[str, Any]:
    return {"class_id": prediction.class_id, "label": prediction.label, "score": prediction.score}


def test_hundreds_of_images_find_room(engine: convoy.Engine, filled_store: StoreFolder) -> None:
    with convoy.Engine(filled_store.root, engine="cpu", max_queue=8, max_inflight_mb=1) as narrow:
        results = narrow.predict("digits", [digit("seven")] * 500)
    assert {result.best.label for result in results} == {"7"}


def test_tensors_are_answered_as_over_http(engine: convoy.Engine, server: Server) -> None:
    (model,) = [one for one in engine.models if one.name == "digits"]
    assert model.spec.image is not None
    images = np.stack([preprocess(digit(word), model.spec.image) for word in ("one", "two", "three")])
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        given = triton.InferInput("images", list(images.shape), "UINT8")
        given.set_data_from_numpy(images)
        expected = client.infer("digits", [given]).as_numpy("logits")
    for form in (images, np.asfortranarray(images), images.tolist()):
        array = np.asarray(form, np.uint8)
        got = engine.infer("digits", {"images": array}, outputs=["logits"])["logits"]
        assert got.dtype == np.float32
        assert np.array_equal(got, expected)
        got[:] = 0  # the caller's own


@pytest.mark.parametrize(
    ("dtype", "array"),
    [
        ("FP32", np.array([[1.5, np.nan, np.inf, -np.inf]], np.float32)),
        ("FP32", np.array([[1.5, 2.5]], ">f4")),
        ("FP16", np.array([[1.5, 65504]], np.float16)),
        ("BF16", np.array([[b"\x80\x3f", b"\xc0\x7f"]], "V2")),
        ("INT64", np.array([[2**62, -1]], np.int64)),
        ("BOOL", np.array([[True, False]])),
        ("BYTES", np.array([[b"one", "zwölf".encode()]], object)),
    ],
)
def test_every_dtype_comes_back_as_it_was_given(engine: convoy.Engine, dtype: str, array: np.ndarray) -> None:
    (name,) = [one.spec.inputs[0].name for one in engine.models if one.name == f"identity_{dtype.lower()}"]
    (got,) = engine.infer(f"identity_{dtype.lower()}", {name: array}).values()
    if array.dtype.kind == "V":
        assert got.tobytes() == array.tobytes()
    else:
        np.testing.assert_array_equal(got, array)
    if dtype == "BYTES":
        (text,) = engine.infer("identity_bytes", {name: np.array([["one", "zwölf"]])}).values()
        assert text.tolist() == got.tolist()


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("images", np.zeros((1, 5, 5, 1), np.uint8)),
        ("images", np.zeros((0, 8, 8, 1), np.uint8)),
        ("images", np.zeros((4096, 8, 8, 1), np.uint8)),
        ("images", np.zeros((1, 8, 8, 1), np.float32)),
        ("pixels", np.zeros((1, 8, 8, 1), np.uint8)),
    ],
)
def test_what_does_not_fit_the_model_is_told_in_the_servers_words(
    engine: convoy.Engine, server: Server, name: str, array: np.ndarray
) -> None:
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        given = triton.InferInput(name, list(array.shape), "UINT8" if array.dtype == np.uint8 else "FP32")
        given.set_data_from_numpy(array)
        with pytest.raises(InferenceServerException) as over_http:
            client.infer("digits", [given], request_id="mine")
    with pytest.raises(InvalidRequest) as caught:
        engine.infer("digits", {name: array}, request_id="mine")
    assert str(caught.value) == over_http.value.message()


@pytest.mark.parametrize("number", [int, float, np.int64, np.float32, np.float16, Fraction, Decimal])
def test_a_time_may_be_a_number_of_any_type(engine: convoy.Engine, number: Callable[[int], Any]) -> None:
    assert engine.predict("digits", digit("seven"), timeout_ms=number(20_000)).best.label == "7"
    assert engine.infer("identity_fp32", {"x": np.ones((1, 3), np.float32)}, timeout_ms=number(20_000))["y"].all()
    (found,) = engine.predict("digits", [digit("two")], timeout_ms=number(20_000))
    assert found.best.label == "2"


def test_other_mistakes_are_told_in_words(engine: convoy.Engine, server: Server) -> None:
    for options in ({"top_k": 0}, {"threshold": 2.0}, {"timeout_ms": -1}, {"timeout_ms": 10**30}):
        query = "&".join(f"{name}={value}" for name, value in options.items())
        expected = server.post(f"/predictions/digits?{query}", content=digit("one")).json()["error"]
        with pytest.raises(InvalidRequest, match=re.escape(expected)):
            engine.predict("digits", digit("one"), **options)  # type: ignore[arg-type]
    for number in (10**400, 10**5000, Decimal("sNaN"), "20", b"5", float("nan"), "many", [1.0]):
        for word in ("timeout_ms", "threshold"):
            with pytest.raises(InvalidRequest, match=f"{word} must be"):
                engine.predict("digits", digit("one"), **{word: number})  # type: ignore[arg-type, call-overload]
    wrong: list[tuple[str, Any, str]] = [
        ("identity_fp32", digit("one"), "has no image preprocessing"),
        ("identity_fp32", [digit("one")], "has no image preprocessing"),
        ("digits", 7, "got int"),
    ]
    for model, images, words in wrong:
        with pytest.raises(InvalidRequest, match=words):
            engine.predict(model, images)
    with pytest.raises(InvalidRequest, match="arrays by name"):
        engine.infer("digits", np.zeros(3))  # type: ignore[arg-type]
    for model, version in (("nobody", None), ("digits", 9), ("digits", "x")):
        path = f"/predictions/{model}" + (f"/{version}" if version else "")
        with pytest.raises(NotFound) as caught:
            engine.predict(model, digit("one"), version=version)
        assert str(caught.value) == server.post(path, content=digit("one")).json()["error"]


def test_a_version_can_be_chosen(engine: convoy.Engine) -> None:
    (name,) = {one.spec.inputs[0].name for one in engine.models if one.name == "shift"}
    given = {name: np.zeros((1, 4), np.float32)}
    (newest,), (first,) = engine.infer("shift", given).values(), engine.infer("shift", given, version=1).values()
    assert (newest[0, 0], first[0, 0]) == (2, 1)
    assert [one.version for one in engine.models if one.name == "shift"] == [1, 2]


# Many who ask


def test_several_loops_may_ask(engine: convoy.Engine) -> None:
    async def ask() -> list[Any]:
        several, tensors, *single = await asyncio.gather(
            engine.apredict("digits", [digit("one"), b"none"]),
            engine.ainfer("shift", {"x": np.zeros((1, 4), np.float32)}),
            *(engine.apredict("digits", digit(word)) for word in ("one", "two", "three")),
        )
        with pytest.raises(NotFound):
            await engine.apredict("nobody", digit("one"))
        assert next(iter(tensors.values()))[0, 0] == 2
        assert [one.error is None for one in several] == [True, False]
        # Waiting in a thread's own way works where a loop runs already, as in a notebook.
        return [*(one.best.label for one in single), engine.predict("digits", digit("four")).best.label]

    with ThreadPoolExecutor(3) as threads:
        for labels in threads.map(lambda _: asyncio.run(ask()), range(3)):
            assert labels == ["1", "2", "3", "4"]


# Life and death


@pytest.fixture
def switches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Engines that do what they are told, in the place of real ones."""
    for name in ("rows", "images"):
        (tmp_path / "store" / name / "1").mkdir(parents=True)
    monkeypatch.setattr(inside, "Core", partial(Core, load_version=Fakes({}, tmp_path).load))
    return tmp_path


def rows(*values: float) -> dict[str, np.ndarray]:
    return {"x": np.repeat(np.array(values, np.float32)[:, None], 4, axis=1)}


def hold(switches: Path) -> None:
    """Every engine that is there, whatever the clock of the file system says."""
    (switches / "hold").touch()
    os.utime(switches / "hold", ns=(time.time_ns() + 10**9,) * 2)


def test_a_lost_engine_is_told_and_the_program_goes_on(switches: Path) -> None:
    with convoy.Engine(switches / "store", engine="cpu") as engine:
        assert engine.infer("rows", rows(1.0))["y"][0, 0] == 1
        assert engine.failure is None
        with pytest.raises(ModelFailed):
            engine.infer("rows", rows(POISON))
        (switches / "fail_load").touch()
        with pytest.raises(Unavailable):
            engine.infer("rows", rows(DIE))
        wait_until(lambda: engine.failure, "the engine says that it is lost")
        assert "could not be replaced" in str(engine.failure)
        with pytest.raises(Unavailable, match=r"the engine failed: .* create a new one"):
            engine.infer("rows", rows(1.0))
        with pytest.raises(Unavailable, match="the engine failed"):
            engine.predict("images", digit("one"))


def test_waiting_callers_hear_of_the_loss(switches: Path) -> None:
    async def await_after_a_cancellation() -> None:
        """As in a clean-up, where a task goes on after it was cancelled."""
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        await engine.ainfer("rows", rows(1.0))

    with convoy.Engine(switches / "store", engine="cpu") as engine, ThreadPoolExecutor(2) as threads:
        hold(switches)
        blocked = threads.submit(engine.infer, "rows", rows(1.0))
        awaiting = threads.submit(lambda: asyncio.run(await_after_a_cancellation()))
        wait_until(lambda: engine._inside._core.open_calls == 2, "both wait")
        engine._inside._on_fatal("the device is gone")
        for caller in (blocked, awaiting):
            with pytest.raises(Unavailable, match="the device is gone"):
                caller.result(30)
        (switches / "hold").unlink()


def test_a_deadline_and_a_cancelled_call_end_what_waits(switches: Path) -> None:
    with convoy.Engine(switches / "store", engine="cpu") as engine:
        hold(switches)
        with pytest.raises(DeadlineExceeded):
            engine.infer("rows", rows(1.0), timeout_ms=20)
        (late,) = engine.predict("images", [digit("one")], timeout_ms=20)
        assert isinstance(late.error, DeadlineExceeded | Overloaded)  # it may be known beforehand

        async def cancelled() -> None:
            task = asyncio.create_task(engine.ainfer("rows", rows(2.0)))
            await asyncio.to_thread(wait_until, lambda: engine._inside._core.open_calls, "it waits")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancelled())
        wait_until(lambda: not engine._inside._core.open_calls, "nobody waits any more")
        (switches / "hold").unlink()
        assert engine.infer("rows", rows(3.0))["y"][0, 0] == 3


def test_a_closed_engine_says_so_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    engine = convoy.Engine(engine="cpu")
    assert engine.predict("digits", digit("six")).best.label == "6"
    engine.close()
    engine.close()
    with pytest.raises(Unavailable, match="the engine is closed"):
        engine.predict("digits", digit("six"))
    wait_until(lambda: set(threading.enumerate()) <= before, "its threads have ended")

    async def open_and_close() -> str | None:
        async with await asyncio.to_thread(convoy.Engine, engine="cpu") as own:
            return (await own.apredict("digits", digit("six"))).best.label

    assert asyncio.run(open_and_close()) == "6"


def test_a_store_with_nothing_to_serve_says_why(store: StoreFolder, tmp_path: Path) -> None:
    (store.add_digits() / "fp32.onnx").write_bytes(b"no network")
    with pytest.raises(JobError, match=r"no model in .*; digits version 1: .*fp32\.onnx"):
        convoy.Engine(store.root, engine="cpu")
    with pytest.raises(UsageError, match="there is no store at"):
        convoy.Engine(tmp_path / "nowhere")


@pytest.mark.parametrize("wrong", [{"engine": "abacus"}, {"precision": "fp3"}, {"max_batch": -1}, {"threads": "x"}])
def test_options_are_checked_as_the_servers_are(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    refused = run_convoy("serve", f"--{name.replace('_', '-')}", str(value))
    with pytest.raises(UsageError) as caught:
        convoy.Engine(**wrong)
    words = str(caught.value).removeprefix(f"{name}: ")
    assert str(caught.value).startswith(f"{name}: ")
    if name != "threads":  # where the command line's own parser is before the settings
        assert words in refused.stderr
    assert refused.returncode == 2


def test_options_hold(filled_store: StoreFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("ENGINE", "abacus"),
        ("PRECISION", "nonsense"),
        ("STORE", "/nowhere"),
        ("MAX_BATCH", "3"),
    ):
        monkeypatch.setenv(f"CONVOY_{name}", value)  # a library does not look there
    with convoy.Engine(filled_store.root, engine="cpu", precision="fp32", max_batch=2, version_policy="1") as engine:
        found = {one.name: one for one in engine.models}
        assert (found["digits"].engine, found["digits"].precision) == ("onnxruntime-cpu", "fp32")
        assert found["digits"].spec.max_batch_size == 2
        assert found["shift"].version == 1


SCRIPT = """
import os, pickle, sys
import convoy
assert not [name for name in ("numpy", "PIL", "onnxruntime", "fastapi", "uvicorn") if name in sys.modules]
assert "Engine" in dir(convoy)
engine = convoy.Engine(engine="cpu")
assert type(engine).__name__ == "Engine" and repr(engine).startswith("<convoy.Engine")
child = os.fork()
if child == 0:
    code = 1
    try:
        engine.predict("digits", b"")
    except convoy.ConvoyError as error:
        code = 0 if "Create an Engine in each process" in str(error) else 2
    engine.close()
    os._exit(code)
assert os.waitpid(child, 0)[1] == 0
try:
    pickle.dumps(engine)
except convoy.ConvoyError as error:
    print(error)
print(engine.predict("digits", sys.argv[1]).best.label)
"""


def test_a_forked_process_is_told_and_a_program_that_closes_nothing_ends() -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SCRIPT, str(DATA / "seven.png")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "an Engine cannot be pickled or sent to another process; create one there"
    assert done.stdout.split("\n")[1] == "7"
    assert done.stderr == ""


def test_an_engine_that_is_forgotten_gives_its_threads_back() -> None:
    before = set(threading.enumerate())
    engine = convoy.Engine(engine="cpu")
    del engine
    wait_until(lambda: set(threading.enumerate()) <= before, "its threads have ended")
