"""The OpenAPI description of the hot routes, which FastAPI cannot see into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI

from convoy.app.edge.http.hot_route import HotRoute
from convoy.app.edge.http.infer import InferRoute
from convoy.app.edge.http.predictions import PredictionsRoute
from convoy.models.spec import NUMPY_DTYPES

_Json = dict[str, Any]

_STATUSES = {
    400: "The request is wrong; the message names the field and the expected value",
    401: "The API key is missing or wrong",
    404: "There is no such model or version",
    408: "The body came too slowly",
    413: "The body, or an image in it, is too large",
    429: "Queue or memory full, or the answer would be late; Retry-After says when to try again",
    500: "The model fails on this request",
    501: "An extension that is not offered",
    503: "Not ready or shutting down; Retry-After says when to try again",
    504: "The deadline passed",
}
_TEXT, _OBJECT, _FILE = {"type": "string"}, {"type": "object"}, {"type": "string", "format": "binary"}


def _object(*required: str, **properties: _Json) -> _Json:
    return {"type": "object", "required": [*required], "properties": properties}


def _list(items: _Json) -> _Json:
    return {"type": "array", "items": items}


_TENSOR = _object(
    *("name", "shape", "datatype"),
    name=_TEXT,
    shape=_list({"type": "integer", "minimum": 0}),
    datatype={"type": "string", "enum": list(NUMPY_DTYPES)},
    parameters=_OBJECT,
    data=_list({}),
)
_OUTPUT = _object("name", name=_TEXT, parameters=_OBJECT)
_INFER_REQUEST = _object("inputs", id=_TEXT, parameters=_OBJECT, inputs=_list(_TENSOR), outputs=_list(_OUTPUT))
_INFER_RESPONSE = _object(
    *("model_name", "model_version", "outputs"), id=_TEXT, model_name=_TEXT, model_version=_TEXT, outputs=_list(_TENSOR)
)
_PREDICTION = _object(
    *("class_id", "label", "score"),
    class_id={"type": "integer"},
    label={"type": ["string", "null"]},
    score={"type": "number"},
)
_DETECTION = _object(
    *("box", "class_id", "label", "score"),
    box={**_list({"type": "number"}), "minItems": 4, "maxItems": 4},
    class_id={"type": "integer"},
    label={"type": ["string", "null"]},
    score={"type": "number"},
)
_WHOLE_NUMBERS = _list({"type": "integer", "minimum": 0})
_MAPPED_CLASS = _object(
    *("class_id", "label", "share", "rle"),
    class_id={"type": "integer"},
    label={"type": ["string", "null"]},
    share={"type": "number"},
    rle=_object("size", "counts", size=_WHOLE_NUMBERS, counts=_WHOLE_NUMBERS),
)
_SEGMENTATION = _object(
    *("height", "width", "unseen_share", "classes"),
    height={"type": "integer"},
    width={"type": "integer"},
    unseen_share={"type": "number"},
    classes=_list(_MAPPED_CLASS),
)
_PREDICTED = _object(
    *("model", "version"),
    model=_TEXT,
    version=_TEXT,
    predictions=_list(_PREDICTION),
    detections=_list(_DETECTION),
    segmentation=_SEGMENTATION,
    timing_ms={"type": "object", "additionalProperties": {"type": "number"}},
    results=_list(_OBJECT),
)
_IN_BASE64 = {"type": "string", "format": "byte"}
_IMAGES_IN_JSON = {
    "type": "object",
    "properties": {"image": _IN_BASE64, "instances": _list({"anyOf": [_IN_BASE64, _object("b64", b64=_IN_BASE64)]})},
    "minProperties": 1,
    "maxProperties": 1,
}
_IMAGE_TYPES = ("image/jpeg", "image/png", "application/octet-stream")
_PREDICTED_EXAMPLE = {
    "model": "digits",
    "version": "1",
    "predictions": [{"class_id": 7, "label": "7", "score": 0.9993}],
    "timing_ms": {"decode_wait": 0.05, "decode": 0.21, "queue": 0.05, "compute": 0.12, "total": 0.61},
}
_INFER_EXAMPLE = {
    "inputs": [{"name": "input", "shape": [1, 4], "datatype": "FP32", "data": [0.1, 0.2, 0.3, 0.4]}],
}


def document_hot_routes(app: FastAPI, routes: Mapping[str, HotRoute]) -> None:
    """Let `/openapi.json` and `/docs` show the hot routes beside FastAPI's own."""
    plain = app.openapi

    def openapi() -> _Json:
        if app.openapi_schema is None:
            document = plain()
            document["paths"] = {**_hot_paths(routes), **document["paths"]}
            _drop_framework_errors(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _drop_framework_errors(document: _Json) -> None:
    """FastAPI promises its own 422 for every parameter; here such a request gets a 400 like any other."""
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document.get("components", {}).get("schemas", {}).pop(name, None)


def _hot_paths(routes: Mapping[str, HotRoute]) -> _Json:
    parameters = {
        name: {"name": name, "in": "path", "required": True, "schema": {"type": kind}}
        for name, kind in (("model", "string"), ("version", "integer"))
    }
    return {
        path: {"post": _OPERATIONS[type(route)]([one for name, one in parameters.items() if f"{{{name}}}" in path])}
        for path, route in routes.items()
    }


def _predictions(path: list[_Json]) -> _Json:
    form = {"type": "object", "properties": {"file": _list(_FILE)}}
    responses = _responses(_PREDICTED, _PREDICTED_EXAMPLE)
    responses["200"]["content"]["image/png"] = {"schema": _FILE}
    return {
        "tags": ["inference"],
        "summary": "What is in an image, or in several in a form or in JSON: classes, boxes, or a class of each pixel",
        "operationId": f"predict_{len(path)}",
        "description": (
            "By the model's task. Predictions: the best top_k classes, five by default; with a threshold, all that "
            "score at least that, or top_k of them. Detections: boxes (x1, y1, x2, y2) in pixels of the upright "
            "picture, the best top_k of those that score at least the threshold, both by default as the model says. "
            "Segmentation: the class of each pixel of the upright picture, as run lengths of COCO, or as a palette "
            "PNG for format=png or Accept: image/png, in which 255 is what the network was not shown."
        ),
        "parameters": [
            *path,
            _query("top_k", {"type": "integer", "minimum": 1}),
            _query("threshold", {"type": "number"}),
            _query("format", {"type": "string", "enum": ["json", "png"]}),
            _TIMEOUT,
        ],
        "requestBody": {
            "required": True,
            "content": {
                **{kind: {"schema": _FILE} for kind in _IMAGE_TYPES},
                "multipart/form-data": {"schema": form},
                "application/json": {"schema": _IMAGES_IN_JSON, "example": {"image": "<base64>"}},
            },
        },
        "responses": responses,
    }


def _infer(path: list[_Json]) -> _Json:
    length = {"name": "Inference-Header-Content-Length", "in": "header", "schema": {"type": "integer", "minimum": 0}}
    responses = _responses(_INFER_RESPONSE, None)
    responses["200"]["content"]["application/octet-stream"] = {"schema": _FILE}
    return {
        "tags": ["inference"],
        "summary": "Infer on tensors (Open Inference Protocol)",
        "description": (
            "JSON; or JSON followed by binary tensors, when Inference-Header-Content-Length is the length of the JSON; "
            "or nothing but the bytes of the model's only input, when it is 0. The body may be gzip or deflate."
        ),
        "operationId": f"infer_{len(path)}",
        "parameters": [*path, length, _TIMEOUT],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": _INFER_REQUEST, "example": _INFER_EXAMPLE},
                "application/octet-stream": {"schema": _FILE},
            },
        },
        "responses": responses,
    }


def _responses(schema: _Json, example: _Json | None) -> _Json:
    content = {"schema": schema} if example is None else {"schema": schema, "example": example}
    answers: _Json = {"200": {"description": "The answer", "content": {"application/json": content}}}
    error = {"application/json": {"schema": _object("error", error=_TEXT)}}
    return answers | {str(status): {"description": words, "content": error} for status, words in _STATUSES.items()}


def _query(name: str, schema: _Json) -> _Json:
    return {"name": name, "in": "query", "required": False, "schema": schema}


_TIMEOUT = _query("timeout_ms", {"type": "number", "exclusiveMinimum": 0})
_OPERATIONS: dict[type[HotRoute], Callable[[list[_Json]], _Json]] = {
    InferRoute: _infer,
    PredictionsRoute: _predictions,
}
