"""The OpenAPI document: FastAPI's, with the hot routes, which it cannot see into, examples, and what keys are for."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI

from convoy.app.calls.options import ServeOptions
from convoy.app.http.docs_routes import seven
from convoy.app.http.examples import (
    BLACK_PICTURE,
    BLACK_PICTURE_FILE,
    ERROR,
    MAIN,
    OBJECT,
    TEXT,
    UNKNOWN,
    add_examples,
    add_names,
    add_unknown_model,
    array,
    examples,
    obj,
)
from convoy.app.http.gate import needs_key, takes_admin_token
from convoy.app.http.hot_route import HotRoute
from convoy.app.http.infer import InferRoute
from convoy.app.http.predictions import PredictionsRoute
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
_FILE = {"type": "string", "format": "binary"}


_TENSOR = obj(
    *("name", "shape", "datatype"),
    name=TEXT,
    shape=array({"type": "integer", "minimum": 0}),
    datatype={"type": "string", "enum": list(NUMPY_DTYPES)},
    parameters=OBJECT,
    data=array({}),
)
_OUTPUT = obj("name", name=TEXT, parameters=OBJECT)
_INFER_REQUEST = obj("inputs", id=TEXT, parameters=OBJECT, inputs=array(_TENSOR), outputs=array(_OUTPUT))
_INFER_RESPONSE = obj(
    *("model_name", "model_version", "outputs"), id=TEXT, model_name=TEXT, model_version=TEXT, outputs=array(_TENSOR)
)
_PREDICTION = obj(
    *("class_id", "label", "score"),
    class_id={"type": "integer"},
    label={"type": ["string", "null"]},
    score={"type": "number"},
)
_DETECTION = obj(
    *("box", "class_id", "label", "score"),
    box={**array({"type": "number"}), "minItems": 4, "maxItems": 4},
    class_id={"type": "integer"},
    label={"type": ["string", "null"]},
    score={"type": "number"},
)
_WHOLE_NUMBERS = array({"type": "integer", "minimum": 0})
_MAPPED_CLASS = obj(
    *("class_id", "label", "share", "rle"),
    class_id={"type": "integer"},
    label={"type": ["string", "null"]},
    share={"type": "number"},
    rle=obj("size", "counts", size=_WHOLE_NUMBERS, counts=_WHOLE_NUMBERS),
)
_SEGMENTATION = obj(
    *("height", "width", "unseen_share", "classes"),
    height={"type": "integer"},
    width={"type": "integer"},
    unseen_share={"type": "number"},
    classes=array(_MAPPED_CLASS),
)
_PREDICTED = obj(
    *("model", "version"),
    model=TEXT,
    version=TEXT,
    predictions=array(_PREDICTION),
    detections=array(_DETECTION),
    segmentation=_SEGMENTATION,
    timing_ms={"type": "object", "additionalProperties": {"type": "number"}},
    results=array(OBJECT),
)
_IN_BASE64 = {"type": "string", "format": "byte"}
_IMAGES_IN_JSON = {
    "type": "object",
    "properties": {"image": _IN_BASE64, "instances": array({"anyOf": [_IN_BASE64, obj("b64", b64=_IN_BASE64)]})},
    "minProperties": 1,
    "maxProperties": 1,
}
_DIGIT = {"predictions": [{"class_id": 7, "label": "7", "score": 0.9911}]}
_TIMING = {"decode_wait": 0.05, "decode": 0.21, "queue": 0.05, "compute": 0.12, "total": 0.61}
_SERVED = {"model": "digits", "version": "1"}
_BLACK = {"name": "images", "shape": [1, 32, 32, 3], "datatype": "UINT8", "data": [*BLACK_PICTURE]}
_WRONG = {"name": "images", "shape": [1, 2], "datatype": "UINT8", "data": [0, 0]}
_LOGITS = [-3.828, 3.6319, 1.0868, 0.6746, -0.1322, 0.2294, -1.1028, -0.0571, -5.3059, -2.1907]
_BEARER = {"type": "http", "scheme": "bearer"}
_KEY, _TOKEN = "apiKey", "adminToken"
_LENGTH = "Inference-Header-Content-Length"


def document_routes(app: FastAPI, routes: Mapping[str, HotRoute], options: ServeOptions) -> None:
    """Let `/openapi.json` show the hot routes beside FastAPI's own, examples of all, and the secrets they want now."""
    plain = app.openapi
    edition = -1

    def openapi() -> _Json:
        nonlocal edition
        if app.openapi_schema is None:
            document = plain()
            _drop_framework_errors(document)
            add_examples(document)
            document["paths"] = {**_hot_paths(routes), **document["paths"]}
            app.openapi_schema = document
        if edition != options.edition:
            edition = options.edition
            _say_secrets(app.openapi_schema, options)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _say_secrets(document: _Json, options: ServeOptions) -> None:
    schemes: _Json = {}
    if options.api_keys:
        schemes[_KEY] = {**_BEARER, "description": "One of the server's API keys"}
    if options.admin_token is not None:
        schemes[_TOKEN] = {**_BEARER, "description": "The admin token, for loading and unloading models"}
    components = document.setdefault("components", {})
    components.pop("securitySchemes", None)
    if schemes:
        components["securitySchemes"] = schemes
    for path, operations in document["paths"].items():
        if takes_admin_token(path) and options.admin_token is not None:
            wanted = _TOKEN
        else:
            wanted = _KEY if options.api_keys and needs_key(path) else ""
        for operation in operations.values():
            operation["security"] = [{wanted: []}] if wanted else []


def _drop_framework_errors(document: _Json) -> None:
    """FastAPI promises its own 422 for every parameter; here such a request gets a 400 like any other."""
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document.get("components", {}).get("schemas", {}).pop(name, None)


def _hot_paths(routes: Mapping[str, HotRoute]) -> _Json:
    paths: _Json = {}
    for path, route in routes.items():
        names = [name for name in ("model", "version") if f"{{{name}}}" in path]
        kinds = {"model": "string", "version": "integer"}
        parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": kinds[name]}} for name in names]
        operation = _OPERATIONS[type(route)](parameters)
        add_names(operation, path)
        add_unknown_model(operation)
        paths[path] = {"post": operation}
    return paths


def _predictions(path: list[_Json]) -> _Json:
    form = {"type": "object", "properties": {"file": array(_FILE)}}
    responses = _responses(_PREDICTED)
    responses["200"]["content"]["image/png"] = {"schema": _FILE}
    png, jpeg = ({"summary": "A seven", "externalValue": f"docs/seven.{kind}"} for kind in ("png", "jpg"))
    in_json = {"summary": "A seven, in base64", "value": {"image": b64encode(seven()).decode()}}
    no_image = {"summary": "Bytes that are no picture", "value": "not an image"}
    bodies = {
        "image/jpeg": {MAIN: jpeg},
        "image/png": {MAIN: png, UNKNOWN: png},
        "application/octet-stream": {MAIN: png, "no-image": no_image},
        "multipart/form-data": {"form": {**png, "summary": "A seven, in the field `file`"}},
    }
    operation = {
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
            {**_query("top_k", {"type": "integer", "minimum": 1}), "examples": _each(1, MAIN, "form")},
            _query("threshold", {"type": "number"}),
            _query("format", {"type": "string", "enum": ["json", "png"]}),
            _TIMEOUT,
        ],
        "requestBody": {
            "required": True,
            "content": {
                **{
                    kind: {"schema": form if kind.startswith("multipart") else _FILE, "examples": some}
                    for kind, some in bodies.items()
                },
                "application/json": {"schema": _IMAGES_IN_JSON, "examples": {MAIN: in_json}},
            },
        },
        "responses": responses,
    }
    timed = {**_DIGIT, "timing_ms": _TIMING}
    examples(operation, 200).update({MAIN: {"value": {**_SERVED, **timed}}})
    examples(operation, 200)["form"] = {"value": {**_SERVED, "results": [timed]}}
    refusal = "these bytes are not an image that is accepted; send a JPEG, PNG, WebP, GIF, BMP or TIFF file"
    examples(operation, 400)["no-image"] = {"value": {"error": refusal}}
    return operation


def _infer(path: list[_Json]) -> _Json:
    length = {"name": _LENGTH, "in": "header", "schema": {"type": "integer", "minimum": 0}}
    responses = _responses(_INFER_RESPONSE)
    responses["200"]["content"]["application/octet-stream"] = {"schema": _FILE}
    black = {"summary": "A black picture", "value": {"inputs": [_BLACK]}}
    bodies = {MAIN: black, UNKNOWN: black, "wrong-shape": {"value": {"inputs": [_WRONG]}}}
    # Not an example of the parameter: that page would send it with the other bodies, too.
    raw = {
        "summary": f"The same as its bytes alone, with {_LENGTH}: 0",
        "externalValue": f"docs/{BLACK_PICTURE_FILE}",
        "x-headers": {_LENGTH: "0"},
    }
    operation = {
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
                "application/json": {"schema": _INFER_REQUEST, "examples": bodies},
                "application/octet-stream": {"schema": _FILE, "examples": {"raw": raw}},
            },
        },
        "responses": responses,
    }
    logits = {"name": "logits", "datatype": "FP32", "shape": [1, 10], "data": _LOGITS}
    answer = {"model_name": "digits", "model_version": "1", "outputs": [logits]}
    examples(operation, 200)[MAIN] = {"value": answer}
    binary = {"summary": "JSON, and behind it ten numbers of 4 bytes", "externalValue": "docs/black.answer"}
    examples(operation, 200, "application/octet-stream")["raw"] = binary
    refusal = (
        "[request id: <id_unknown>] unexpected shape for input 'images' for model 'digits'. Expected [-1,32,32,3], got "
        "[1,2]. NOTE: with a max_batch_size above 0 the first dimension is the batch."
    )
    examples(operation, 400)["wrong-shape"] = {"value": {"error": refusal}}
    return operation


def _responses(schema: _Json) -> _Json:
    answers: _Json = {"200": {"description": "The answer", "content": {"application/json": {"schema": schema}}}}
    for status, words in _STATUSES.items():
        answers[str(status)] = {"description": words, "content": {"application/json": {"schema": ERROR}}}
    return answers


def _each(value: object, *names: str) -> _Json:
    return {name: {"value": value} for name in names}


def _query(name: str, schema: _Json) -> _Json:
    return {"name": name, "in": "query", "required": False, "schema": schema}


_TIMEOUT = _query("timeout_ms", {"type": "number", "exclusiveMinimum": 0})
_OPERATIONS: dict[type[HotRoute], Callable[[list[_Json]], _Json]] = {
    InferRoute: _infer,
    PredictionsRoute: _predictions,
}
