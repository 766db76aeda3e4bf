"""An infer request's JSON: the fields by the typed decoder, the values of tensors as JSON has them."""

from __future__ import annotations

import json
import math
import threading
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from convoy.app.http import json_documents
from convoy.app.http.json_documents import InferDocument, read_document, read_values
from convoy.models.errors import InvalidRequest

PADDING = " " * 4096  # so that it is long enough to be worth it
FLOATS, INTEGERS = ("FP32", "FP64"), ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")


def read(text: str | bytes) -> InferDocument:
    return read_document(memoryview(text.encode() if isinstance(text, str) else text))


def values(data: Any, datatype: str = "FP32", padding: str = PADDING) -> Any:
    """What becomes of a tensor's data."""
    text = json.dumps(data)
    return read_values(
        msgspec.Raw((text.replace("[", "[" + padding, 1) if text[0] == "[" else text).encode()), datatype
    )


def request(**more: Any) -> str:
    return json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1.5, 2]}], **more})


def test_a_request_has_its_fields_and_its_data_is_read_later() -> None:
    found = read(request(id="a", parameters={"priority": 3}, outputs=[{"name": "y"}], other=[1]))
    (tensor,) = found.inputs
    assert (tensor.name, tensor.datatype, tensor.shape, tensor.parameters) == ("x", "FP32", [2], {})
    assert np.array_equal(read_values(tensor.data, "FP32"), [1.5, 2])
    assert (found.id, found.parameters, found.outputs and found.outputs[0].name) == ("a", {"priority": 3}, "y")
    assert read('{"inputs": [], "id": null, "outputs": null}').outputs is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", "Expected `object`, got `array`"),
        ("17", "Expected `object`, got `int`"),
        ("{}", "Object missing required field `inputs`"),
        ('{"inputs": {"x": 1}}', "Expected `array`, got `object` - at `$.inputs`"),
        ('{"inputs": [{"name": "x", "shape": []}]}', "missing required field `datatype` - at `$.inputs[0]`"),
        ('{"inputs": [{"name": 5, "shape": [], "datatype": "FP32"}]}', "Expected `str`, got `int`"),
        ('{"inputs": [{"name": "x", "shape": [1.5], "datatype": "FP32"}]}', "at `$.inputs[0].shape[0]`"),
        ('{"inputs": [{"name": "x", "shape": [true], "datatype": "FP32"}]}', "Expected `int`, got `bool`"),
        ('{"inputs": [], "parameters": []}', "Expected `object`, got `array` - at `$.parameters`"),
        ('{"inputs": [], "outputs": [1]}', "at `$.outputs[0]`"),
        ('{"inputs": [], "id": 5}', "at `$.id`"),
        ('{"inputs": [], "id": NaN}', "at `$.id`"),
        (json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1]}] * 257}), "at `$.inputs`"),
        (b'{"inputs": [], "id": "\xda"}', "failed to parse the request JSON buffer: 'utf-8' codec"),
        (b'{"inputs": [], "parameters": {"\xda": 1}}', "failed to parse the request JSON buffer: 'utf-8' codec"),
        (b'{"inputs": [{"name": "a\xda"}]}', "failed to parse the request JSON buffer: 'utf-8' codec"),
        ('{"inputs": ["\\ud800"]}', "failed to parse the request JSON buffer"),
        ("", "failed to parse the request JSON buffer"),
        ("{", "failed to parse the request JSON buffer"),
        ('{"inputs": [],}', "failed to parse the request JSON buffer"),
        ('{"inputs": []} x', "failed to parse the request JSON buffer"),
        ('{"inputs": [], "a": 01}', "failed to parse the request JSON buffer"),
        ('{"inputs": [], "a": ' + "[" * 200_000, "nesting depth"),
    ],
)
def test_what_is_no_request_is_refused_in_words(text: str | bytes, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(text)
    assert words in str(refused.value)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have_are_read(number: str) -> None:
    tensor = read(request().replace("1.5", number)).inputs[0]
    first, second = read_values(tensor.data, "FP32")  # type: ignore[misc]
    assert not math.isfinite(first)
    assert second == 2


def test_a_name_with_a_nul_in_it_is_another_name() -> None:
    text = '{"inputs": [{"name": "x", "name\\u0000": 1, "shape": [1], "shape\\u0000": 2, "datatype": "FP32"}]}'
    (tensor,) = read(text).inputs
    assert (tensor.name, tensor.shape) == ("x", [1])


@pytest.mark.parametrize("datatype", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize("data", [[1, 2, 3], [[1], [2]], [[[1, 2], [3, 4]], [[5, 6], [7, 8]]], [[], []], [[[[3]]]], []])
def test_even_lists_of_numbers_are_arrays(data: Any, datatype: str) -> None:
    found = values(data, datatype)
    assert found.dtype == (np.float64 if datatype in FLOATS else np.int64)
    assert found.tolist() == np.asarray(data).ravel().tolist()


def test_large_integers_are_arrays_where_they_may_be() -> None:
    data = [1, 1 << 63, (1 << 64) - 1]
    assert values(data, "UINT64").dtype == np.uint64
    assert values(data, "UINT64").tolist() == data
    assert values(data, "INT64") == data


numbers = st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers(-(1 << 63), (1 << 64) - 1))
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4)),
    max_leaves=12,
)
tensors = st.one_of(
    anything, st.lists(numbers, max_size=8), st.lists(st.lists(numbers, min_size=2, max_size=2), max_size=4)
)


names = st.sampled_from(["inputs", "outputs", "parameters", "id", "name", "shape", "datatype", "data"])
halves = st.text(st.characters(codec=None, categories=["Cs"]), min_size=1, max_size=2)
documents = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.text(max_size=5), halves),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.one_of(names, halves), inner, max_size=5)),
    max_leaves=12,
)


@given(documents)
def test_any_json_is_a_request_or_refused(document: Any) -> None:
    try:
        found = read(json.dumps(document))
    except InvalidRequest:
        return
    assert [one.name for one in found.inputs] == [one["name"] for one in document["inputs"]]


@given(tensors, st.sampled_from([*FLOATS, *INTEGERS, "BOOL", "BYTES", "FP16", "nonsense"]))
@example([[1], 2], "FP32")
@example([1, [2]], "INT8")
@example([[1, 2], [3]], "FP32")
@example([[[1], [2]], [[3], 4]], "UINT8")
@example([[1], []], "FP32")
@example([1.0, True], "FP32")
@example([1, 1 << 64], "UINT64")
@example(["["], "FP32")
@example("[1]", "FP32")
def test_any_data_is_what_json_makes_of_it(data: Any, datatype: str) -> None:
    found, expected = values(data, datatype), orjson.loads(json.dumps(data))
    if isinstance(found, np.ndarray):
        flat = np.asarray(expected, object).ravel().tolist()
        assert found.tolist() == ([float(one) for one in flat] if datatype in FLOATS else flat)
        assert {type(one) for one in flat} <= ({int, float} if datatype in FLOATS else {int})
        np.asarray(expected)  # an uneven list would raise
    else:
        assert found == expected
        assert json.dumps(found) == json.dumps(expected), "1 is not true"


@pytest.mark.parametrize("text", ["[%s]", "[%s", "%s"])
@pytest.mark.parametrize("value", ["{}", "NaN", '"a"', "[], {}"])
def test_of_a_long_document_only_so_much_becomes_objects(
    text: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_documents, "INLINE_JSON_BYTES", 0)
    monkeypatch.setattr(json_documents, "_MOST_OBJECTS", 1000)
    data = text % ",".join([value] * 3000)
    with pytest.raises(InvalidRequest, match="send binary tensor data"):
        read_values(msgspec.Raw(data.encode()), "FP32")
    if "NaN" in data:
        with pytest.raises(InvalidRequest, match="send binary tensor data"):
            read(request().replace("1.5", data))


def test_arrays_outlive_the_next_document() -> None:
    held = [values([float(number), math.pi]) for number in range(20)]
    assert [one.tolist() for one in held] == [[float(number), math.pi] for number in range(20)]


def test_threads_do_not_share_a_parser() -> None:
    wrong: list[int] = []

    def work(own: int) -> None:
        for number in range(200):
            data = [float(own), float(number)] * 500
            if values(data).tolist() != data:
                wrong.append(own)

    threads = [threading.Thread(target=work, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
