"""Decoding as a part of the work, from the outside: who is decoded, who is not, and whose label is whose."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from PIL import Image

from tests.support.crowds import at_once
from tests.support.pictures import enlarged, saved
from tests.support.servers import Server, metric, on_one_cpu, peak_bytes, start_server, wait_until
from tests.support.stores import digit, picture
from tests.support.wire import Wire, check_refused, head

DIGITS = "/predictions/digits"
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
FORMATS = ("PNG", "JPEG", "WebP", "GIF", "BMP", "TIFF")
STAGE = "convoy_stage_duration_seconds_count"


def test_of_many_sizes_and_formats_each_label_is_its_own_files(demo: Server) -> None:
    """Large and small ones overtake each other, and some are broken, which harms nobody else."""
    chance = random.Random(4)
    sizes = [8, 28, 64, 300, 1200]
    forms = [(word, enlarged(word, chance.choice(sizes[1:]), form)) for form in FORMATS for word in WORDS]
    broken = [("", enlarged("five", 300, form)[:-900]) for form in ("PNG", "JPEG", "WebP")] + [("", b"GIF89a")]
    files = [*forms, *broken]
    chance.shuffle(files)
    posted = [("file", (str(number), data)) for number, (_, data) in enumerate(files)]
    for _ in range(3):
        results = demo.post(DIGITS, files=posted).json()["results"]
        found = [one["predictions"][0]["class_id"] if "error" not in one else None for one in results]
        assert found == [WORDS.index(word) if word else None for word, _ in files]
    wait_until(lambda: not demo.stats()["inflight_bytes"], "all memory is free")
    for stage in ("decode_wait", "decode"):
        wait_until(
            lambda stage=stage: metric(demo, STAGE, stage=stage, model="digits") >= 3 * len(forms), "it is counted"
        )


def test_pictures_that_come_together_are_each_told_what_they_asked_for(demo: Server) -> None:
    """Those of one turn are read together, and each asks for another number of classes or another threshold."""
    asked = [(word, query) for word in WORDS for query in ("top_k=1", "top_k=3", "threshold=0.001", "")]
    random.Random(5).shuffle(asked)

    def post(word: str, query: str) -> httpx.Response:
        return demo.post(f"{DIGITS}?{query}", content=digit(word))

    alone = [post(*one).json()["predictions"] for one in asked]
    for _ in range(3):
        together = at_once([partial(post, *one) for one in asked])
        for one, expected in zip(together, alone, strict=True):
            close = [best | {"score": pytest.approx(best["score"], abs=1e-5)} for best in expected]
            assert one.json()["predictions"] == close


def test_a_wait_for_decoding_is_a_stage_of_its_own(demo: Server) -> None:
    alone = demo.post(DIGITS, content=digit("two"))
    assert alone.json()["timing_ms"]["decode_wait"] == 0
    assert "decode_wait;dur=0.000, decode;dur=" in alone.headers["server-timing"]
    waited = demo.post(DIGITS, content=enlarged("two", 500, "PNG")).json()["timing_ms"]
    assert 0 < waited["decode_wait"] <= waited["total"]
    assert demo.stats()["models"][0]["stages"]["decode_wait"]["p99_ms"] > 0


def asked_by_grpc(
    client: triton.InferenceServerClient, data: bytes, name: str, ended: list[tuple[str, str]], **options: Any
) -> None:
    """Ask for a picture; `ended` has its name and what is wrong, in the order in which such calls end."""
    tensor = triton.InferInput("image", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([data], np.object_))
    client.async_infer("digits", [tensor], lambda result, error: ended.append((name, str(error or ""))), **options)


def test_while_others_wait_to_be_decoded_the_protocols_priority_and_timeout_hold() -> None:
    """As in the queue: the urgent overtake, and who is not to wait for long is told so, and costs nothing."""
    slow, ended = enlarged("seven", 1500, "WebP"), list[tuple[str, str]]()
    with (
        on_one_cpu(),
        start_server("--threads", "1") as server,
        triton.InferenceServerClient(server.grpc_address) as client,
    ):
        for _ in range(40):
            asked_by_grpc(client, slow, "ordinary", ended)
        wait_until(lambda: server.stats()["waiting_to_decode"] >= 30, "most of them wait")
        asked_by_grpc(client, slow, "later", ended, priority=3)
        asked_by_grpc(client, slow, "urgent", ended, priority=1)
        asked_by_grpc(client, slow, "short", ended, timeout=1000)
        wait_until(lambda: len(ended) == 43, "all have ended")
        assert {error for name, error in ended if name != "short"} == {""}
        (why,) = (error for name, error in ended if name == "short")
        assert "timeout expired" in why or "is predicted to miss the deadline" in why
        order = [name for name, _ in ended if name != "short"]
        # Where the system does not keep it to one CPU, what begins last may end before the one beside it.
        assert "later" in order[-2:]
        assert order.index("urgent") < len(order) - 6, "it does not wait for all of them"
        assert ended.index(("short", why)) < ended.index(("urgent", ""))
        wait_until(lambda: metric(server, STAGE, stage="decode", model="digits") >= 42, "those are counted")
        assert metric(server, STAGE, stage="decode", model="digits") == 42, "who could not wait was not decoded"


def test_those_who_left_cost_nothing_behind_them() -> None:
    """Of many that leave at once only those are decoded that have begun."""
    slow = picture(3000, "RGB", "WebP")
    with on_one_cpu(), start_server("--max-body-mb", "8") as server:
        for _ in range(24):
            with Wire(server.port) as wire:
                wire.send(head(DIGITS, {"Content-Length": str(len(slow))}) + slow)
        assert server.post(DIGITS, content=enlarged("seven", 300, "PNG")).json()["predictions"][0]["label"] == "7"
        calls = "convoy_call_duration_seconds_count"
        wait_until(lambda: metric(server, calls, outcome="cancelled") == 24, "all have ended")
        wait_until(lambda: not server.stats()["inflight_bytes"], "the decoder has given back what it had")
        assert metric(server, STAGE, stage="decode") < 12


def test_those_who_leave_while_their_picture_is_computed_leave_nothing_behind(demo: Server) -> None:
    """Of more than may be decoded ahead: if they were thought to be there still, the next would wait for ever."""
    data = digit("four")
    request = head(DIGITS, {"Content-Length": str(len(data))}) + data
    for _ in range(12):
        with ExitStack() as stack:
            wires = [stack.enter_context(Wire(demo.port)) for _ in range(32)]
            for wire in wires:
                wire.send(request)
                assert wire.reply().status == 200
            for wire in wires:
                wire.send(request)
    wait_until(demo.is_at_rest, "all have ended")
    answer = demo.post(DIGITS, content=data).json()
    assert (answer["predictions"][0]["label"], answer["timing_ms"]["decode_wait"]) == ("4", 0)


# --- memory

MIB = 1 << 20
# What a process may use for its work beside the memory that its requests are admitted to.
LEEWAY_BYTES = 128 * MIB


def photo(width: int, height: int) -> bytes:
    """One that has to be turned."""
    exif = Image.Exif()
    exif[274] = 6
    return saved(Image.new("RGB", (width, height), (9, 9, 9)), "JPEG", exif=exif)


def test_an_image_that_takes_more_memory_than_there_is_is_refused_with_advice() -> None:
    """150 KB of 36 million pixels with alpha, which nobody begins to decode."""
    with start_server("--max-body-mb", "8", "--max-inflight-mb", "64") as server:
        assert server.post(DIGITS, content=digit("seven")).status_code == 200
        before, large = peak_bytes(server), picture(6000, "RGBA", "PNG")
        check_refused(server.post(DIGITS, content=large), 413, "--max-inflight-mb", "6000x6000")
        assert peak_bytes(server) - before < 32 * MIB
        answer = server.post(DIGITS, files=[("file", ("a", large)), ("file", ("b", digit("one")))])
        too_large, good = answer.json()["results"]
        assert "--max-inflight-mb" in too_large["error"]
        assert good["predictions"][0]["label"] == "1"


def test_decoding_at_once_stays_within_the_memory_for_requests() -> None:
    """Sixteen, of which one takes a quarter: they wait for each other, and none is refused."""
    image, allowed = photo(2000, 1700), 128 * MIB
    with start_server("--max-body-mb", "8", "--max-inflight-mb", str(allowed // MIB)) as server:
        assert server.post(DIGITS, content=digit("seven")).status_code == 200
        before = peak_bytes(server)
        with ThreadPoolExecutor(16) as pool:
            codes = list(pool.map(lambda _: server.post(DIGITS, content=image).status_code, range(32)))
        assert codes == [200] * 32
        assert peak_bytes(server) - before <= allowed + LEEWAY_BYTES // 2
        wait_until(lambda: not server.stats()["inflight_bytes"], "all memory is free")


def test_more_pixels_than_the_operator_allows_are_refused_from_the_header() -> None:
    with start_server("--max-pixels", "10000") as server:
        assert server.post(DIGITS, content=enlarged("three", 100, "PNG")).json()["predictions"][0]["label"] == "3"
        check_refused(
            server.post(DIGITS, content=enlarged("three", 101, "WebP")),
            400,
            "more than the 10000 allowed",
            "--max-pixels",
        )


def test_by_default_photos_of_fifty_megapixels_are_taken(demo: Server) -> None:
    assert demo.post(DIGITS, content=photo(8200, 6100)).status_code == 200
