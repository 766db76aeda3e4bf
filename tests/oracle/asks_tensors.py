"""Asks that are tensors over HTTP: every dtype in every form, classes of them, and shared memory."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

from tests.e2e import test_bad_input as bad
from tests.oracle.asks_routes import squeezed
from tests.oracle.book import Book
from tests.support.wire_forms import BINARY_ONLY, DTYPES, Sample, extremes, nothing, scalar

INPUT_BYTES, OUTPUT_BYTES = 8192, 8192
_FORMS = ("json", "binary", "shared")
_LENGTH = "Inference-Header-Content-Length"


def samples(dtype: str) -> dict[str, Sample]:
    """By the model that takes each."""
    name = dtype.lower()
    return {
        f"identity_{name}": extremes(dtype, text=True),
        f"scalar_{name}": scalar(dtype),
        f"whole_{name}": nothing(dtype),
    }


def input_region() -> bytes:
    """What the input region holds: each sample at a place of its own."""
    data = b"".join(extremes(dtype, text=True).data.ljust(_room(dtype), b"\xee") for dtype in DTYPES)
    return data.ljust(INPUT_BYTES, b"\xee")


def tensors(regions: tuple[str, str]) -> Book:
    """`regions` are an input and an output region that exist, of INPUT_BYTES and OUTPUT_BYTES."""
    book = Book()
    _register(book, regions)
    offset = 0
    for dtype in DTYPES:
        for model, sample in samples(dtype).items():
            for form_in, form_out in product(_FORMS, _FORMS):
                if "json" in (form_in, form_out) and dtype in BINARY_ONLY:
                    continue
                if form_in == "shared" and not model.startswith("identity"):
                    continue
                body, given = _request(sample, form_in, form_out, regions, offset)
                book.post(f"/v2/models/{model}/infer", body, f"{form_in} to {form_out}", given)
                if form_out == "shared":
                    book.region(regions[1], f"after {model} {form_in}")
            for encoding in ("gzip", "deflate"):
                body, given = _request(sample, "binary", "binary", regions, offset)
                given |= {"Content-Encoding": encoding, "Accept-Encoding": encoding}
                book.post(f"/v2/models/{model}/infer", squeezed(body, encoding), f"binary in {encoding}", given)
            raw = b"any \0 bytes" if dtype == "BYTES" else sample.data
            book.post(f"/v2/models/{model}/infer", raw, "raw", {_LENGTH: "0"})
        if dtype in BINARY_ONLY:
            one = {"name": "x", "shape": [1, 1], "datatype": dtype, "data": [1.0]}
            book.post_json(f"/v2/models/identity_{dtype.lower()}/infer", {"inputs": [one]}, "as JSON")
        for count in (0, 1, 2, 1000, -1, 1.5, "3", True):
            body, given = _request(extremes(dtype, text=True), "binary", "classes", regions, offset, classes=count)
            book.post(f"/v2/models/identity_{dtype.lower()}/infer", body, f"{count} classes", given)
        offset += _room(dtype)
    return book.extend(_parameters()).extend(_places(regions)).extend(_large())


def _room(dtype: str) -> int:
    return -(-len(extremes(dtype, text=True).data) // 8) * 8


def _register(book: Book, regions: tuple[str, str]) -> None:
    for name, nbytes in zip(regions, (INPUT_BYTES, OUTPUT_BYTES), strict=True):
        path = f"/v2/systemsharedmemory/region/{name}/register"
        book.post_json(path, {"key": f"/{name}", "offset": 0, "byte_size": nbytes}, "register")


def _request(
    sample: Sample, form_in: str, form_out: str, regions: tuple[str, str], offset: int, classes: object = None
) -> tuple[bytes, dict[str, str]]:
    tensor: dict[str, Any] = {"name": "x", "shape": list(sample.shape), "datatype": sample.dtype}
    tail = b""
    if form_in == "json":
        tensor["data"] = sample.values
    elif form_in == "shared":
        place = {"shared_memory_region": regions[0], "shared_memory_offset": offset}
        tensor["parameters"] = place | {"shared_memory_byte_size": len(sample.data)}
    else:
        tensor["parameters"], tail = {"binary_data_size": len(sample.data)}, sample.data
    wanted: dict[str, Any] = {
        "json": {"binary_data": False},
        "binary": {"binary_data": True},
        "shared": {"shared_memory_region": regions[1], "shared_memory_byte_size": OUTPUT_BYTES},
        "classes": {"classification": classes},
    }[form_out]
    text = json.dumps({"id": "own", "inputs": [tensor], "outputs": [{"name": "y", "parameters": wanted}]}).encode()
    return text + tail, {_LENGTH: str(len(text))} if form_in == "binary" else {}


def _parameters() -> Book:
    """What a request may say beside its tensors."""
    book = Book()
    for parameters in (
        *({"custom": "text", "count": 3, "share": 0.5, "flag": True}, {"priority": 0}, {"priority": 1}),
        *({"timeout": 60_000_000}, {"timeout": 1}, {"sequence_id": 0, "sequence_start": False}, {"sequence_id": 3}),
        *({"headers": "none"}, {"binary_data_output": True}, {"triton_mine": 1}, {"list": [1]}, {"nothing": None}),
        *({"timeout": True}, {"priority": -1}, {"priority": 1 << 64}, {"priority": 1, "timeout": 60_000_000}),
    ):
        book.post(bad.SIMPLE, bad.simple(parameters=parameters), f"with {json.dumps(parameters)[:60]}")
    for wanted in (["OUTPUT1"], ["OUTPUT1", "OUTPUT0"], []):
        book.post(bad.SIMPLE, bad.simple(outputs=[{"name": name} for name in wanted]), f"wanting {wanted}")
    for rows in (1, 2, 31, 32):
        data = {"shape": [rows, 16], "data": list(range(rows * 16))}
        document = {"inputs": [bad.tensor("INPUT0", **data), bad.tensor("INPUT1", **data)]}
        book.post_json(bad.SIMPLE, document, f"{rows} rows")
        book.post_json("/v2/models/simple/versions/1/infer", document, f"{rows} rows")
    for values in ([0.0] * 6, [0.0, 1.0] * 3, [1.0] * 6):
        one = {"name": "x", "shape": [6], "datatype": "FP32", "data": values}
        book.post_json("/v2/models/nonzero/infer", {"inputs": [one]}, "of unknown size")
    for value in (0, 1, -0.0, 1e308, "NaN"):
        text = json.dumps({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [value] * 4}]})
        book.post("/v2/models/shift/infer", text.replace('"NaN"', "NaN").encode(), f"of {value}")
    return book


def _places(regions: tuple[str, str]) -> Book:
    """Regions that are not there, too small, twice, or left."""
    book = Book()
    for changes in (
        *({"key": "/convoy-no-such-region"}, {"key": "/"}, {"key": ""}, {"key": 7}, {"key": "/../etc/passwd"}),
        *({"offset": -1}, {"offset": 1 << 62}, {"byte_size": 0}, {"byte_size": 1 << 40}, {"byte_size": "8"}),
    ):
        document = {"key": f"/{regions[0]}", "offset": 0, "byte_size": 8} | changes
        book.post_json("/v2/systemsharedmemory/region/other/register", document, f"with {changes}")
    book.post_json(
        "/v2/systemsharedmemory/region/other/register", {"key": f"/{regions[0]}", "byte_size": 64}, "register"
    )
    book.post_json(
        "/v2/systemsharedmemory/region/other/register", {"key": f"/{regions[0]}", "byte_size": 64}, "register"
    )
    for path in ("/v2/systemsharedmemory/status", "/v2/systemsharedmemory/region/other/status"):
        book.get(path, "with regions")
    for place in (
        *({"shared_memory_region": "nobody"}, {"shared_memory_offset": 60}, {"shared_memory_offset": -1}),
        *({"shared_memory_byte_size": 63}, {"shared_memory_byte_size": 65}, {"shared_memory_byte_size": "64"}),
    ):
        whole = {"shared_memory_region": "other", "shared_memory_byte_size": 64} | place
        first = {"name": "INPUT0", "shape": [1, 16], "datatype": "INT32", "parameters": whole}
        book.post_json(bad.SIMPLE, {"inputs": [first, bad.tensor("INPUT1")]}, f"from {place}")
        wanted = {"name": "OUTPUT0", "parameters": whole}
        book.post(bad.SIMPLE, bad.simple(outputs=[wanted]), f"into {place}")
    book.post("/v2/systemsharedmemory/region/other/unregister", b"", "of one")
    book.post("/v2/systemsharedmemory/unregister", b"", "of all")
    book.get("/v2/systemsharedmemory/status", "without regions")
    return book


def _large() -> Book:
    """Bodies that are not worth a place on the event loop, which are decoded and written elsewhere."""
    book = Book()
    values = list(range(100_000))
    one = {"name": "x", "shape": [1, len(values)], "datatype": "INT64", "data": values}
    for accepted in ("identity", "gzip"):
        book.post_json("/v2/models/identity_int64/infer", {"inputs": [one]}, "large", {"Accept-Encoding": accepted})
    size = {"binary_data_size": 1_000_000}
    one = {"name": "x", "shape": [1, 250_000], "datatype": "FP32", "parameters": size}
    text = json.dumps({"inputs": [one]})
    given = {_LENGTH: str(len(text))}
    book.post("/v2/models/identity_fp32/infer", text.encode() + bytes(1_000_000), "large and binary", given)
    return book
