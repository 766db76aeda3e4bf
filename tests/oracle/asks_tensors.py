"""Requests of tensors over HTTP: every dtype in every form, classes of them, and shared memory."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

from tests.e2e import test_bad_input as bad
from tests.oracle.asks_routes import row
from tests.oracle.session import Ask, get, post, region
from tests.support.wire_forms import BINARY_ONLY, DTYPES, Sample, extremes, nothing, scalar

REGION_BYTES = 8192
_LENGTH = "Inference-Header-Content-Length"
# What a request may say beside its tensors.
_PARAMETERS = (
    *({"custom": "text", "count": 3, "share": 0.5, "flag": True}, {"priority": 0}, {"priority": 1}),
    *({"timeout": 60_000_000}, {"timeout": 1}, {"sequence_id": 0, "sequence_start": False}, {"sequence_id": 3}),
    *({"headers": "none"}, {"binary_data_output": True}, {"triton_mine": 1}, {"list": [1]}, {"nothing": None}),
    *({"timeout": True}, {"priority": -1}, {"priority": 1 << 64}),
)
_WRONG_REGIONS = (
    *({"key": "/convoy-no-such-region"}, {"key": "/"}, {"key": ""}, {"key": 7}, {"key": "/../etc/passwd"}),
    *({"offset": -1}, {"offset": 1 << 62}, {"byte_size": 0}, {"byte_size": 1 << 40}, {"byte_size": "8"}),
)
_WRONG_PLACES = (
    *({"shared_memory_region": "nobody"}, {"shared_memory_offset": 60}, {"shared_memory_offset": -1}),
    *({"shared_memory_byte_size": 63}, {"shared_memory_byte_size": 65}, {"shared_memory_byte_size": "64"}),
)


def input_region() -> bytes:
    """What the input region holds: the extremes of each dtype at a place of their own."""
    return b"".join(extremes(dtype, text=True).data.ljust(_room(dtype)) for dtype in DTYPES).ljust(REGION_BYTES)


def _room(dtype: str) -> int:
    return -(-len(extremes(dtype, text=True).data) // 8) * 8


def tensors(given: str, target: str) -> list[Ask]:
    """Both are the names of regions that exist, of REGION_BYTES each."""
    document = {"offset": 0, "byte_size": REGION_BYTES}
    asks = [
        post(f"/v2/systemsharedmemory/region/{name}/register", {"key": f"/{name}", **document}, "register")
        for name in (given, target)
    ]
    offset = 0
    for dtype in DTYPES:
        asks += _of_dtype(dtype, {"shared_memory_region": given, "shared_memory_offset": offset}, target)
        offset += _room(dtype)
    return [*asks, *_parameters(), *_places(given), *_large()]


def _of_dtype(dtype: str, place: dict[str, Any], target: str) -> list[Ask]:
    outputs: dict[str, dict[str, Any]] = {
        "json": {"binary_data": False},
        "binary": {"binary_data": True},
        "shared": {"shared_memory_region": target, "shared_memory_byte_size": REGION_BYTES},
    }
    name, whole = dtype.lower(), extremes(dtype, text=True)
    samples = {f"identity_{name}": whole, f"scalar_{name}": scalar(dtype), f"whole_{name}": nothing(dtype)}
    asks = []
    for model, sample in samples.items():
        path = f"/v2/models/{model}/infer"
        for form_in, form_out in product(("json", "binary", "shared"), outputs):
            is_possible = sample is whole or form_in != "shared"
            if not is_possible or ("json" in (form_in, form_out) and dtype in BINARY_ONLY):
                continue
            body, given = _request(sample, form_in, place, outputs[form_out])
            asks.append(post(path, body, f"{form_in} to {form_out}", given))
            if form_out == "shared":
                asks.append(region(target, f"after {model} {form_in}"))
        body, given = _request(sample, "binary", place, {"binary_data": True})
        gzipped = {"Content-Encoding": "gzip", "Accept-Encoding": "gzip"}
        asks.append(post(path, bad.SQUEEZE["gzip"](body), "binary in gzip", given | gzipped))
        asks.append(post(path, b"any \0 bytes" if dtype == "BYTES" else sample.data, "raw", {_LENGTH: "0"}))
    path = f"/v2/models/identity_{name}/infer"
    if dtype in BINARY_ONLY:
        asks.append(post(path, row([1.0], dtype), "as JSON"))
    for count in (0, 1, 2, 1000, -1, 1.5, "3", True):
        body, given = _request(whole, "binary", place, {"classification": count})
        asks.append(post(path, body, f"{count} classes", given))
    return asks


def _request(sample: Sample, form: str, place: dict[str, Any], wanted: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
    tensor: dict[str, Any] = {"name": "x", "shape": list(sample.shape), "datatype": sample.dtype}
    if form == "json":
        tensor["data"] = sample.values
    elif form == "shared":
        tensor["parameters"] = place | {"shared_memory_byte_size": len(sample.data)}
    else:
        tensor["parameters"] = {"binary_data_size": len(sample.data)}
    text = json.dumps({"id": "own", "inputs": [tensor], "outputs": [{"name": "y", "parameters": wanted}]}).encode()
    return (text + sample.data, {_LENGTH: str(len(text))}) if form == "binary" else (text, {})


def _parameters() -> list[Ask]:
    """Parameters, outputs, sizes and values of requests in JSON."""
    batches = {rows: {"shape": [rows, 16], "data": list(range(rows * 16))} for rows in (2, 32)}
    unknown = {"name": "x", "shape": [6], "datatype": "FP32"}
    return [
        *(post(bad.SIMPLE, bad.simple(parameters=one), f"with {json.dumps(one)[:60]}") for one in _PARAMETERS),
        *(
            post(bad.SIMPLE, bad.simple(outputs=[{"name": name} for name in wanted]), f"wanting {wanted}")
            for wanted in (["OUTPUT1"], ["OUTPUT1", "OUTPUT0"], [])
        ),
        *(
            post(
                "/v2/models/simple/versions/1/infer",
                {"inputs": [bad.tensor("INPUT0", **data), bad.tensor("INPUT1", **data)]},
                f"{rows} rows",
            )
            for rows, data in batches.items()
        ),
        *(
            post("/v2/models/nonzero/infer", {"inputs": [{**unknown, "data": values}]}, "of unknown size")
            for values in ([0.0] * 6, [0.0, 1.0] * 3)
        ),
        *(post("/v2/models/shift/infer", row([value] * 4), f"of {value}") for value in (-0.0, 1e308, float("nan"))),
    ]


def _places(name: str) -> list[Ask]:
    """Regions that are not there, too small, twice, or left."""
    path, whole = (
        "/v2/systemsharedmemory/region/other",
        {"shared_memory_region": "other", "shared_memory_byte_size": 64},
    )
    asks = [
        *(
            post(f"{path}/register", {"key": f"/{name}", "offset": 0, "byte_size": 8, **changes}, f"with {changes}")
            for changes in _WRONG_REGIONS
        ),
        *[post(f"{path}/register", {"key": f"/{name}", "byte_size": 64}, "register")] * 2,
        get("/v2/systemsharedmemory/status", "with regions"),
        get(f"{path}/status", "with regions"),
    ]
    for changes in _WRONG_PLACES:
        place = whole | changes
        first = {"name": "INPUT0", "shape": [1, 16], "datatype": "INT32", "parameters": place}
        into = bad.simple(outputs=[{"name": "OUTPUT0", "parameters": place}])
        asks.append(post(bad.SIMPLE, {"inputs": [first, bad.tensor("INPUT1")]}, f"from {changes}"))
        asks.append(post(bad.SIMPLE, into, f"into {changes}"))
    return [
        *asks,
        post(f"{path}/unregister", b"", "of one"),
        post("/v2/systemsharedmemory/unregister", b"", "of all"),
        get("/v2/systemsharedmemory/status", "without regions"),
    ]


def _large() -> list[Ask]:
    """Bodies that are not worth a place on the event loop, which are decoded and written elsewhere."""
    document = row(list(range(100_000)), "INT64")
    body, given = _request(Sample("FP32", (1, 250_000), bytes(1_000_000)), "binary", {}, {"binary_data": True})
    return [
        *(
            post("/v2/models/identity_int64/infer", document, "large", {"Accept-Encoding": accepted})
            for accepted in ("identity", "gzip")
        ),
        post("/v2/models/identity_fp32/infer", body, "large and binary", given),
    ]
