"""What simdjson reads for us is what orjson would have read, or orjson reads it."""

from __future__ import annotations

import json
import math
import threading
import time
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from convoy.app.http import json_documents
from convoy.app.http.json_documents import loads

PADDING = " " * 4096  # so that it is long enough to be worth it


def read(text: str | bytes) -> Any:
    data = text.encode() if isinstance(text, str) else text
    return loads(memoryview(data + PADDING.encode()))


def request(data: Any, datatype: str = "FP32", **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": datatype, "shape": [1], "data": data}], **more}


def as_lists(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        assert value.dtype.name in ("float64", "int64", "uint64")
        assert value.ndim == 1
        return value.tolist()
    if isinstance(value, dict):
        return {name: as_lists(one) for name, one in value.items()}
    return [as_lists(one) for one in value] if isinstance(value, list) else value


def test_flat_numbers_of_float_tensors_are_arrays() -> None:
    for datatype in ("FP32", "FP64"):
        values = read(orjson.dumps(request([1, 2.5, -3e-7], datatype, id="a")))
        assert isinstance(values["inputs"][0]["data"], np.ndarray)
        assert as_lists(values) == request([1, 2.5, -3e-7], datatype, id="a")


@pytest.mark.parametrize("datatype", ["INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"])
def test_flat_integers_of_integer_tensors_are_arrays(datatype: str) -> None:
    found = read(orjson.dumps(request([1, -2, 1 << 62], datatype)))["inputs"][0]["data"]
    assert (found.dtype.name, found.tolist()) == ("int64", [1, -2, 1 << 62])
    for data in ([1, 0.5], [1.0], [1, True], [1, None], ["1"], [1, -1, 1 << 63]):
        document = request(data, datatype)
        found = read(orjson.dumps(document))
        assert found == document
        assert [type(one) for one in found["inputs"][0]["data"]] == [type(one) for one in data]


def test_large_integers_are_arrays_where_they_may_be() -> None:
    data = [1, 1 << 63, (1 << 64) - 1]
    found = read(orjson.dumps(request(data, "UINT64")))["inputs"][0]["data"]
    assert (found.dtype.name, found.tolist()) == ("uint64", data)
    assert read(orjson.dumps(request(data, "INT64"))) == request(data, "INT64")


@pytest.mark.parametrize("data", [[[1], [2]], [[[1, 2], [3, 4]], [[5, 6], [7, 8]]], [[], []], [[[[3]]]]])
@pytest.mark.parametrize("datatype", ["FP32", "UINT8"])
def test_evenly_nested_numbers_are_arrays(data: Any, datatype: str) -> None:
    found = read(orjson.dumps(request(data, datatype)))["inputs"][0]["data"]
    assert isinstance(found, np.ndarray)
    assert found.tolist() == np.asarray(data).ravel().tolist()


@pytest.mark.parametrize(
    "data", [[[1], 2], [1, [2]], [[1, 2], [3]], [[[1], [2]], [[3], 4]], [[[1]], [2]], [[1], []], [[], [1]], [[1], {}]]
)
@pytest.mark.parametrize("is_long", [False, True])
def test_unevenly_nested_numbers_stay_what_they_are(
    data: Any, monkeypatch: pytest.MonkeyPatch, *, is_long: bool
) -> None:
    monkeypatch.setattr(json_documents, "INLINE_JSON_BYTES", 0 if is_long else 1 << 20)
    for datatype in ("FP32", "UINT8"):
        assert read(orjson.dumps(request(data, datatype))) == request(data, datatype)


@pytest.mark.parametrize("datatype", ["BOOL", "BYTES", "FP16", "nonsense", None, 7, ["FP32"]])
def test_other_tensors_are_lists(datatype: Any) -> None:
    for data in ([1, 2], [1 << 63], [True], ["a"], [0.5], [[1], [2]]):
        document = request(data, datatype)
        assert read(orjson.dumps(document)) == document


@pytest.mark.parametrize(
    "data",
    [[[1.0, 2.0], [3.0]], [1.0, True], [None], ["1"], [1.0, [2.0]], [{}], {"a": 1}, "abc", None, 1.5],
)
def test_whatever_is_no_list_of_numbers_stays_what_it_is(data: Any) -> None:
    document = request(data)
    found = read(orjson.dumps(document))
    assert found == document
    assert type(found["inputs"][0]["data"]) is type(data)


def test_a_bracket_in_a_text_is_no_list() -> None:
    document = request([1.0, 2.0], id="[")
    assert as_lists(read(orjson.dumps(document))) == document


def test_several_tensors_each_are_what_they_are() -> None:
    document = {"inputs": [*request([1.0])["inputs"], *request([True], "BOOL")["inputs"], *request([3])["inputs"]]}
    found = read(orjson.dumps(document))
    assert as_lists(found) == document
    assert [type(one["data"]) for one in found["inputs"]] == [np.ndarray, list, np.ndarray]
    nested = {"inputs": [*request([1.0])["inputs"], *request([[2.0], 3])["inputs"]]}
    assert as_lists(read(orjson.dumps(nested))) == nested


def test_an_empty_list_is_empty() -> None:
    assert as_lists(read(orjson.dumps(request([])))) == request([])


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        '{"inputs": [{"data": [1], "data": [2], "datatype": "FP32"}]}',
        '{"inputs": [1], "inputs": [2]}',
        '{"inputs": {"data": [1.0]}}',
        '{"inputs": [1, [2], "x", null]}',
        "[1, 2]",
        '"text"',
        "17",
        '{"inputs": [{"datatype": "FP32", "data": [18446744073709551616]}]}',
        '{"inputs": [{"datatype": "FP32", "data": [1e-999]}]}',
    ],
)
def test_unusual_documents_are_read_as_orjson_reads_them(text: str) -> None:
    assert as_lists(read(text)) == orjson.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"inputs": [1,]}',
        '{"inputs": [NaN]}',
        '{"inputs": [{"datatype": "FP32", "data": [1e999]}]}',
        '"\\ud800"',
        "[" * 2000 + "]" * 2000,
        '{"a": 01}',
        "\ufeff{}",
        '{"inputs": [{"data": [1]}]} x',
    ],
)
def test_what_is_no_json_is_told_in_orjsons_words(text: str) -> None:
    data = memoryview((text + PADDING).encode())
    with pytest.raises(orjson.JSONDecodeError) as theirs:
        orjson.loads(data)
    with pytest.raises(orjson.JSONDecodeError) as ours:
        loads(data)
    assert str(ours.value) == str(theirs.value)
    assert read('{"a": 1}') == {"a": 1}, "the parser is as good as before"


numbers = st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers(-(1 << 63), (1 << 64) - 1))
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4)),
    max_leaves=12,
)
fields = st.dictionaries(
    st.sampled_from(["name", "shape", "data", "datatype", "parameters", "other"]),
    st.one_of(
        anything,
        st.sampled_from(["FP32", "FP64", "INT64", "UINT8"]),
        st.lists(numbers, max_size=8),
        st.lists(st.lists(numbers, min_size=2, max_size=2), max_size=4),
    ),
)
documents = st.dictionaries(
    st.sampled_from(["inputs", "outputs", "id", "parameters", "x"]), st.one_of(anything, st.lists(fields, max_size=3))
)


def assert_read_as_by_orjson(text: bytes) -> None:
    found = as_lists(read(text))
    if rb"\u0000" in text and found == orjson.loads(text):
        return  # a name with a NUL in it: such a document is left to orjson, which makes no list flat
    assert found == flattened(orjson.loads(text))


@given(st.one_of(anything, documents))
@example({"outputs": [{"\0": None}], "inputs": [{"datatype": "FP32", "data": [[0.0, 0.0]]}]})
def test_any_document_is_what_orjson_makes_of_it(document: Any) -> None:
    assert_read_as_by_orjson(json.dumps(document).encode())


@given(st.one_of(anything, documents))
@example({"outputs": [{"\0": None}], "inputs": [{"datatype": "FP32", "data": [[0.0, 0.0]]}]})
def test_any_long_document_is_what_orjson_makes_of_it(document: Any) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_documents, "INLINE_JSON_BYTES", 0)
        patched.setattr(json_documents, "_FEW_BRACKETS", 0)
        assert_read_as_by_orjson(json.dumps(document).encode())


@pytest.mark.parametrize("text", ['{"inputs": [%s]}', '{"inputs": [], "x": [%s]}', "[%s]", "[%s", "%s"])
@pytest.mark.parametrize("value", ["[]", "{}", "NaN", "1", '"a"'])
def test_of_a_long_document_only_so_much_becomes_objects(
    text: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_documents, "INLINE_JSON_BYTES", 0)
    monkeypatch.setattr(json_documents, "_MOST_LISTS", 1000)
    monkeypatch.setattr(json_documents, "_MOST_OBJECTS", 1000)
    try:
        found = read(text % ",".join([value] * 3000))
    except json_documents.TooManyObjects:
        return
    assert value in ("1", '"a"')
    assert len(found["x"]) == 3000, "others run while they become objects"


def test_many_members_cost_what_they_are() -> None:
    """simdjson looks for each among all of them: sixteen times as many would cost 256 times as much."""
    assert cpu_s_of_members(64_000) < 100 * cpu_s_of_members(4_000)


def cpu_s_of_members(count: int) -> float:
    """Seconds of this thread to read an object of so many members; the least of a few, for others have the caches."""
    document = {str(number): number for number in range(count)}
    text = json.dumps(document)
    taken_s = []
    for _ in range(3):
        started_s = time.thread_time()
        found = read(text)
        taken_s.append(time.thread_time() - started_s)
        assert found == document
    return min(taken_s)


def test_a_name_with_a_nul_in_it_is_read() -> None:
    """simdjson lists it, and looks for what stands before the NUL, which may be another's name."""
    document = {"\0E": 1, "inputs": [{"name": "x", "na\0me": 3, "name\0": [1.0]}], "a long enough text": "-" * 4096}
    assert as_lists(read(json.dumps(document).encode())) == document
    document = {"": 1, "\0": 2, "inputs": [], "a long enough text": "-" * 4096}
    assert as_lists(read(json.dumps(document).encode())) == document


def flattened(document: Any) -> Any:
    """What orjson read, where an even list of numbers of a tensor of numbers becomes a flat one."""
    if not isinstance(document, dict) or not isinstance(document.get("inputs"), list):
        return document
    if not all(isinstance(one, dict) for one in document["inputs"]):
        return document
    for one in document["inputs"]:
        if one.get("datatype") in ("FP32", "FP64", "INT64", "UINT8") and isinstance(one.get("data"), list):
            one["data"] = flat(one["data"], float if one["datatype"] in ("FP32", "FP64") else int)
    return document


def flat(data: list[Any], kind: type) -> list[Any]:
    try:
        found = np.asarray(data).shape
    except ValueError:
        return data
    values = np.asarray(data, object).reshape(found).ravel().tolist()
    if kind is float:
        return [float(one) for one in values] if all(type(one) in (int, float) for one in values) else data
    is_whole = all(type(one) is int and one < 1 << 63 for one in values)
    return values if is_whole else data


def test_arrays_outlive_the_next_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_documents.orjson, "loads", None)  # nobody may need it here
    held = [read(json.dumps(request([float(number), math.pi]))) for number in range(20)]
    assert [as_lists(one)["inputs"][0]["data"] for one in held] == [[float(n), math.pi] for n in range(20)]


def test_threads_do_not_share_a_parser() -> None:
    wrong: list[int] = []

    def work(own: int) -> None:
        for number in range(200):
            data = [float(own), float(number)] * 500
            if as_lists(read(json.dumps(request(data)))) != request(data):
                wrong.append(own)

    threads = [threading.Thread(target=work, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
