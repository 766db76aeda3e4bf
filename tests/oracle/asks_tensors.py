"""Requests of tensors over HTTP: every dtype in every form, classes of them, and shared memory."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

from tests.e2e import test_bad_input as bad
from tests.oracle.asks_routes import row
from tests.oracle.session import Session
from tests.support.wire_forms import BINARY_ONLY, DTYPES, Sample, extremes, nothing, scalar

REGION_BYTES = 8192
_LENGTH = "Inference-Header-Content-Length"


def input_region() -> bytes:
    """What the input region holds: the extremes of each dtype at a place of their own."""
    return b"".join(extremes(dtype, text=True).data.ljust(_room(dtype)) for dtype in DTYPES).ljust(REGION_BYTES)


def _room(dtype: str) -> int:
    return -(-len(extremes(dtype, text=True).data) // 8) * 8


def tensors(session: Session, regions: tuple[str, str]) -> None:
    """`regions` are an input and an output region that exist, of REGION_BYTES each."""
    for name in regions:
        document = {"key": f"/{name}", "offset": 0, "byte_size": REGION_BYTES}
        session.post(f"/v2/systemsharedmemory/region/{name}/register", document, "register")
    offset = 0
    for dtype in DTYPES:
        place = {"shared_memory_region": regions[0], "shared_memory_offset": offset}
        _dtype(session, dtype, place, regions[1])
        offset += _room(dtype)
    _parameters(session)
    _places(session, regions[0])
    _large(session)


def _dtype(session: Session, dtype: str, place: dict[str, Any], target: str) -> None:
    outputs: dict[str, dict[str, Any]] = {
        "json": {"binary_data": False},
        "binary": {"binary_data": True},
        "shared": {"shared_memory_region": target, "shared_memory_byte_size": REGION_BYTES},
    }
    name = dtype.lower()
    whole = extremes(dtype, text=True)
    for model, sample in (
        (f"identity_{name}", whole),
        (f"scalar_{name}", scalar(dtype)),
        (f"whole_{name}", nothing(dtype)),
    ):
        path = f"/v2/models/{model}/infer"
        for form_in, form_out in product(("json", "binary", "shared"), outputs):
            is_possible = sample is whole or form_in != "shared"
            if not is_possible or ("json" in (form_in, form_out) and dtype in BINARY_ONLY):
                continue
            body, given = _request(sample, form_in, place, outputs[form_out])
            session.post(path, body, f"{form_in} to {form_out}", given)
            if form_out == "shared":
                session.region(target, f"after {model} {form_in}")
        body, given = _request(sample, "binary", place, {"binary_data": True})
        given |= {"Content-Encoding": "gzip", "Accept-Encoding": "gzip"}
        session.post(path, bad.SQUEEZE["gzip"](body), "binary in gzip", given)
        session.post(path, b"any \0 bytes" if dtype == "BYTES" else sample.data, "raw", {_LENGTH: "0"})
    path = f"/v2/models/identity_{name}/infer"
    if dtype in BINARY_ONLY:
        session.post(path, row([1.0], dtype), "as JSON")
    for count in (0, 1, 2, 1000, -1, 1.5, "3", True):
        body, given = _request(whole, "binary", place, {"classification": count})
        session.post(path, body, f"{count} classes", given)


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


def _parameters(session: Session) -> None:
    """What a request may say beside its tensors."""
    for parameters in (
        *({"custom": "text", "count": 3, "share": 0.5, "flag": True}, {"priority": 0}, {"priority": 1}),
        *({"timeout": 60_000_000}, {"timeout": 1}, {"sequence_id": 0, "sequence_start": False}, {"sequence_id": 3}),
        *({"headers": "none"}, {"binary_data_output": True}, {"triton_mine": 1}, {"list": [1]}, {"nothing": None}),
        *({"timeout": True}, {"priority": -1}, {"priority": 1 << 64}),
    ):
        session.post(bad.SIMPLE, bad.simple(parameters=parameters), f"with {json.dumps(parameters)[:60]}")
    for wanted in (["OUTPUT1"], ["OUTPUT1", "OUTPUT0"], []):
        session.post(bad.SIMPLE, bad.simple(outputs=[{"name": name} for name in wanted]), f"wanting {wanted}")
    for rows in (2, 32):
        data = {"shape": [rows, 16], "data": list(range(rows * 16))}
        document = {"inputs": [bad.tensor("INPUT0", **data), bad.tensor("INPUT1", **data)]}
        session.post("/v2/models/simple/versions/1/infer", document, f"{rows} rows")
    for values in ([0.0] * 6, [0.0, 1.0] * 3):
        one = {"name": "x", "shape": [6], "datatype": "FP32", "data": values}
        session.post("/v2/models/nonzero/infer", {"inputs": [one]}, "of unknown size")
    for value in (-0.0, 1e308, float("nan")):
        session.post("/v2/models/shift/infer", row([value] * 4), f"of {value}")


def _places(session: Session, region: str) -> None:
    """Regions that are not there, too small, twice, or left."""
    path = "/v2/systemsharedmemory/region/other"
    for changes in (
        *({"key": "/convoy-no-such-region"}, {"key": "/"}, {"key": ""}, {"key": 7}, {"key": "/../etc/passwd"}),
        *({"offset": -1}, {"offset": 1 << 62}, {"byte_size": 0}, {"byte_size": 1 << 40}, {"byte_size": "8"}),
    ):
        session.post(
            f"{path}/register", {"key": f"/{region}", "offset": 0, "byte_size": 8, **changes}, f"with {changes}"
        )
    for _ in range(2):
        session.post(f"{path}/register", {"key": f"/{region}", "byte_size": 64}, "register")
    session.get("/v2/systemsharedmemory/status", "with regions")
    session.get(f"{path}/status", "with regions")
    for changes in (
        *({"shared_memory_region": "nobody"}, {"shared_memory_offset": 60}, {"shared_memory_offset": -1}),
        *({"shared_memory_byte_size": 63}, {"shared_memory_byte_size": 65}, {"shared_memory_byte_size": "64"}),
    ):
        whole = {"shared_memory_region": "other", "shared_memory_byte_size": 64, **changes}
        first = {"name": "INPUT0", "shape": [1, 16], "datatype": "INT32", "parameters": whole}
        session.post(bad.SIMPLE, {"inputs": [first, bad.tensor("INPUT1")]}, f"from {changes}")
        session.post(bad.SIMPLE, bad.simple(outputs=[{"name": "OUTPUT0", "parameters": whole}]), f"into {changes}")
    session.post(f"{path}/unregister", b"", "of one")
    session.post("/v2/systemsharedmemory/unregister", b"", "of all")
    session.get("/v2/systemsharedmemory/status", "without regions")


def _large(session: Session) -> None:
    """Bodies that are not worth a place on the event loop, which are decoded and written elsewhere."""
    for accepted in ("identity", "gzip"):
        document = row(list(range(100_000)), "INT64")
        session.post("/v2/models/identity_int64/infer", document, "large", {"Accept-Encoding": accepted})
    large = Sample("FP32", (1, 250_000), bytes(1_000_000))
    body, given = _request(large, "binary", {}, {"binary_data": True})
    session.post("/v2/models/identity_fp32/infer", body, "large and binary", given)
