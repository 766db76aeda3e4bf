"""An HTTP edge remembers the words around tensors: what it answers from memory is what it would answer anew."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.app.loading.load import LoadedModel, LoadOptions
from convoy.models.spec import ModelSpec, TensorSpec
from convoy.models.store import StoredVersion
from tests.support.fake_devices import Workshop, proved
from tests.support.fake_engine import FakeEngine
from tests.support.wire import WireReply, head
from tests.unit.test_direct import LENGTH, House, play, told

ROW = 2


class Echoes(Workshop):
    """Models that give their input back; each takes the datatype that begins its name."""

    def load(self, stored: StoredVersion, options: LoadOptions) -> LoadedModel:
        x, y = (TensorSpec(name, stored.name.partition("-")[0], (ROW,)) for name in "xy")
        engine = FakeEngine((x,), (y,), max_batch_size=4, run_rows=lambda arrays: [arrays[0]])
        spec = ModelSpec(stored.name, (x,), (y,), 4, None, "none", ())
        return LoadedModel(stored, spec, (proved(engine),), (), 0.0)  # type: ignore[arg-type]


MODELS = ("FP32-a", "FP32-b", "FP64-a", "INT32-a", "BYTES-a")


def binary(header: bytes, tensors: bytes, model: str = "FP32-a") -> bytes:
    lengths = {LENGTH: str(len(header)), "Content-Length": str(len(header) + len(tensors))}
    return head(f"/v2/models/{model}/infer", lengths) + header + tensors


def header_of(samples: int, nbytes: int, dtype: str = "FP32", **more: Any) -> bytes:
    tensor = {"name": "x", "datatype": dtype, "shape": [samples, ROW], "parameters": {"binary_data_size": nbytes}}
    return json.dumps({"inputs": [tensor], **more}).encode()


async def anew(workshop: Workshop, request: bytes) -> WireReply:
    """What an edge answers that has heard nothing before."""
    house = House(workshop)
    try:
        return await house.connect().ask(request)
    finally:
        house.hot.close()


def are_as_anew(folder: Path, requests: Sequence[bytes]) -> None:
    """Each twice on one connection, so that what was learned is used, and once where nothing was."""

    async def scene(house: House, workshop: Workshop) -> None:
        connection = house.connect()
        for request in requests:
            first, again = [told(await connection.ask(request)) for _ in range(2)]
            assert first == again == told(await anew(workshop, request))

    play(Echoes(folder, models=MODELS), scene)


def ask_all(folder: Path, *requests: bytes) -> list[WireReply]:
    """The answers on one connection."""
    replies: list[WireReply] = []

    async def scene(house: House, _: Workshop) -> None:
        connection = house.connect()
        replies.extend([await connection.ask(request) for request in requests])

    play(Echoes(folder, models=MODELS), scene)
    return replies


def test_binary_tensors_are_answered_from_memory_as_they_would_be_anew(tmp_path: Path) -> None:
    sizes = st.sampled_from([8, 16, 24])
    of_a_request = st.tuples(st.integers(0, 6), sizes, st.sampled_from(["FP32-a", "FP32-b"]), st.sampled_from([1, 2]))

    @settings(max_examples=25)
    @given(st.lists(of_a_request, max_size=15))
    def check(drawn: list[tuple[int, int, str, int]]) -> None:
        are_as_anew(
            tmp_path,
            [
                binary(header_of(samples, nbytes, id=f"{samples}"), bytes([value]) * nbytes, model)
                for samples, nbytes, model, value in drawn
            ],
        )

    check()


def test_the_same_header_with_fewer_bytes_behind_it_is_refused(tmp_path: Path) -> None:
    header = header_of(2, 16)
    good, bad = ask_all(tmp_path, binary(header, bytes(16)), binary(header, bytes(8)))
    assert good.status == 200
    assert bad.status == 400
    assert "expecting 8 additional bytes" in bad.error


def test_strings_are_looked_at_every_time(tmp_path: Path) -> None:
    header = header_of(1, 10, "BYTES")
    strings = b"\1\0\0\0a\1\0\0\0b", b"\1\0\0\0a\x09\0\0\0b"
    replies = ask_all(tmp_path, *(binary(header, data, "BYTES-a") for data in strings))
    assert [reply.status for reply in replies] == [200, 400]


def json_text(numbers: str, *, before: str = "", after: str = "", dtype: str = "FP32", samples: int = 1) -> bytes:
    tensor = f'"name": "x", "shape": [{samples}, {ROW}], "datatype": "{dtype}"'
    return f'{{{before} "inputs": [{{{tensor}, "data" : {numbers} {after}}}] }}'.encode()


def in_json(text: bytes, model: str = "FP32-a") -> bytes:
    return head(f"/v2/models/{model}/infer", {"Content-Length": str(len(text))}) + text


numbers_of_any_form = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.integers(-(1 << 70), 1 << 70).map(str),
    st.sampled_from(
        ["1e39", "-0", "1E5", "true", "null", '"1"', "[1]", "NaN", "1]", "01", '1], "id": "x", "y": [2', ""]
    ),
)
lists = st.lists(numbers_of_any_form, min_size=1, max_size=4).map(lambda one: f"[{', '.join(one)}]")


def test_numbers_between_known_words_are_what_they_would_be_anew(tmp_path: Path) -> None:
    dtypes = ("FP32", "FP64", "INT32")
    of_a_request = st.tuples(
        lists,
        st.sampled_from(["", '"id": "a",', '"id": "b",', '"id": "[",', '"id": "\\"data\\"",']),
        st.sampled_from(["", ', "parameters": {}', ', "data": [7, 8]', "]"]),
        st.sampled_from(dtypes),
    )

    @settings(max_examples=25)
    @given(st.lists(of_a_request, max_size=15))
    def check(drawn: list[tuple[str, str, str, str]]) -> None:
        known = [("[1, 2]", "", "", dtype) for dtype in dtypes]  # so that there is something to remember
        are_as_anew(
            tmp_path,
            [
                in_json(json_text(numbers, before=before, after=after, dtype=dtype), f"{dtype}-a")
                for numbers, before, after, dtype in (*known, *drawn)
            ],
        )

    check()


@pytest.mark.parametrize("form", ["binary", "json"])
def test_memory_is_bounded(tmp_path: Path, form: str) -> None:
    """After 256 requests whose words never come again, as many others add nothing; each has 3 KB."""
    count = 256

    def request(number: int) -> bytes:
        own_id = f"{number:03000}"
        if form == "json":
            return in_json(json_text("[1, 2]", before=f'"id": "{own_id}",'))
        return binary(header_of(1, 8, id=own_id), bytes(8))

    async def scene(house: House, _: Workshop) -> None:
        connection = house.connect()
        held = []
        tracemalloc.start()
        try:
            for number in range(2 * count):
                assert (await connection.ask(request(number))).status == 200
                if number in (count - 1, 2 * count - 1):
                    held.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert held[1] - held[0] < count * 1000

    play(Echoes(tmp_path, models=MODELS), scene)
