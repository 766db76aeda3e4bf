"""The OpenAPI document: FastAPI's, with the hot routes, which it cannot see, examples, and security schemes."""

from __future__ import annotations

from base64 import b64encode
from copy import deepcopy
from typing import Any

from fastapi import FastAPI

from convoy.app.calls.access import ServeOptions
from convoy.app.http.examples import (
    BLACK_PICTURE,
    BLACK_PICTURE_FILE,
    ERROR,
    MAIN,
    OBJECT,
    TEXT,
    UNKNOWN,
    add_examples,
    add_unknown_model,
    array,
    obj,
)
from convoy.app.http.gate import needs_key, takes_admin_token
from convoy.app.http.infer import InferRoute
from convoy.app.http.pages import seven
from convoy.app.http.predictions import PredictionsRoute
from convoy.models.answers import MASK_FORMS, Box
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
_MASK = obj(
    *("size", "counts"),
    size={**array({"type": "integer"}), "minItems": 2, "maxItems": 2},
    counts={"type": "string", "description": "COCO's compressed run lengths"},
)
_POLYGONS = array({**array({"type": "integer"}), "description": "x, y, x, y and so on"})
_DETECTION = obj(
    *("class_id", "label", "score", "box"),
    class_id={"type": "integer"},
    label={"type": ["string", "null"]},
    score={"type": "number"},
    box=obj(*Box._fields, **{side: {"type": "number"} for side in Box._fields}),
    mask=_MASK,
    polygons=_POLYGONS,
    keypoints=array(obj("x", "y", x={"type": "number"}, y={"type": "number"}, score={"type": "number"})),
)
_COCO_RECORD = obj(
    *("image_id", "category_id", "bbox", "score"),
    image_id={"type": ["integer", "string"]},
    category_id={"type": "integer"},
    bbox={**array({"type": "number"}), "minItems": 4, "maxItems": 4},
    score={"type": "number"},
    segmentation={"anyOf": [_MASK, _POLYGONS]},
    keypoints=array({"type": "number"}),
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
_DIGIT = {
    "predictions": [{"class_id": 7, "label": "7", "score": 0.9911}],
    "timing_ms": {"decode_wait": 0.05, "decode": 0.21, "queue": 0.05, "compute": 0.12, "total": 0.61},
}
_SERVED = {"model": "digits", "version": "1"}
_BLACK = {"name": "images", "shape": [1, 32, 32, 3], "datatype": "UINT8", "data": [*BLACK_PICTURE]}
_WRONG = {"name": "images", "shape": [1, 2], "datatype": "UINT8", "data": [0, 0]}
_LOGITS = [-3.828, 3.6319, 1.0868, 0.6746, -0.1322, 0.2294, -1.1028, -0.0571, -5.3059, -2.1907]
_BEARER = {"type": "http", "scheme": "bearer"}
_KEY, _TOKEN = "apiKey", "adminToken"
_LENGTH = "Inference-Header-Content-Length"


def _query(name: str, schema: _Json) -> _Json:
    return {"name": name, "in": "query", "required": False, "schema": schema}


def _responses(answer: _Json, refusals: _Json) -> _Json:
    """`answer` is the content of a 200; `refusals` are examples of a 400."""
    responses: _Json = {"200": {"description": "The answer", "content": answer}}
    for status, words in _STATUSES.items():
        responses[str(status)] = {"description": words, "content": {"application/json": {"schema": ERROR}}}
    responses["400"]["content"]["application/json"]["examples"] = refusals
    return responses


_TIMEOUT = _query("timeout_ms", {"type": "number", "exclusiveMinimum": 0})
_PNG, _JPEG = ({"summary": "A seven", "externalValue": f"docs/seven.{kind}"} for kind in ("png", "jpg"))
_PREDICT: _Json = {
    "tags": ["Predict"],
    "summary": "Classify images, find objects, or segment",
    "description": (
        "By the model's task. Predictions: the best top_k classes, five by default; with a threshold, all that "
        "score at least that, or top_k of them. Detections: boxes with corners (x1, y1) and (x2, y2) in pixels of the "
        "upright picture, the best top_k of those that score at least the threshold and overlap by at most iou, all "
        "three by default as the model says; with format=coco, an array of COCO's result records. A model that finds "
        "masks gives the mask of each object as compressed run lengths of COCO, its outlines for masks=polygons, or "
        "none for masks=none; a pose model gives keypoints. "
        "Segmentation: the class of each pixel of the upright picture, as run lengths of COCO, or as a palette "
        "PNG for format=png or Accept: image/png, in which 255 is what the network was not shown."
    ),
    "parameters": [
        {
            **_query("top_k", {"type": "integer", "minimum": 1}),
            "examples": {MAIN: {"value": 1}, "form": {"value": 1}},
        },
        _query("threshold", {"type": "number"}),
        _query("iou", {"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
        _query("masks", {"type": "string", "enum": [*MASK_FORMS]}),
        _query("format", {"type": "string", "enum": ["json", "png", "coco"]}),
        _TIMEOUT,
    ],
    "requestBody": {
        "required": True,
        "content": {
            "image/jpeg": {"schema": _FILE, "examples": {MAIN: _JPEG}},
            "image/png": {"schema": _FILE, "examples": {MAIN: _PNG, UNKNOWN: _PNG}},
            "application/octet-stream": {
                "schema": _FILE,
                "examples": {
                    MAIN: _PNG,
                    "no-image": {"summary": "Bytes that are no picture", "value": "not an image"},
                },
            },
            "multipart/form-data": {
                "schema": {"type": "object", "properties": {"file": array(_FILE)}},
                "examples": {"form": {**_PNG, "summary": "A seven, in the field `file`"}},
            },
            "application/json": {
                "schema": _IMAGES_IN_JSON,
                "examples": {
                    MAIN: {
                        "summary": "A seven, in base64",
                        "value": {"image": b64encode(seven()).decode()},
                    },
                },
            },
        },
    },
    "responses": _responses(
        {
            "application/json": {
                "schema": {"anyOf": [_PREDICTED, array(_COCO_RECORD)]},
                "examples": {
                    MAIN: {"value": {**_SERVED, **_DIGIT}},
                    "form": {"value": {**_SERVED, "results": [_DIGIT]}},
                },
            },
            "image/png": {"schema": _FILE},
        },
        {
            "no-image": {
                "value": {
                    "error": (
                        "these bytes are not an image in a supported format; send a JPEG, PNG, WebP, GIF, BMP or TIFF "
                        "file"
                    ),
                    "code": "invalid_image",
                }
            }
        },
    ),
}
_BLACK_PICTURE = {"summary": "A black picture", "value": {"inputs": [_BLACK]}}
_INFER: _Json = {
    "tags": ["Predict"],
    "summary": "Run a model on tensors (Open Inference Protocol)",
    "description": (
        "JSON; or JSON followed by binary tensors, when Inference-Header-Content-Length is the length of the JSON; "
        "or nothing but the bytes of the model's only input, when it is 0. The body may be gzip or deflate."
    ),
    "parameters": [{"name": _LENGTH, "in": "header", "schema": {"type": "integer", "minimum": 0}}, _TIMEOUT],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": _INFER_REQUEST,
                "examples": {
                    MAIN: _BLACK_PICTURE,
                    UNKNOWN: _BLACK_PICTURE,
                    "wrong-shape": {"value": {"inputs": [_WRONG]}},
                },
            },
            "application/octet-stream": {
                "schema": _FILE,
                "examples": {
                    # Not an example of the parameter: Swagger UI would send it with the other bodies as well.
                    "raw": {
                        "summary": f"The same as its bytes alone, with {_LENGTH}: 0",
                        "externalValue": f"docs/{BLACK_PICTURE_FILE}",
                        "x-headers": {_LENGTH: "0"},
                    },
                },
            },
        },
    },
    "responses": _responses(
        {
            "application/json": {
                "schema": _INFER_RESPONSE,
                "examples": {
                    MAIN: {
                        "value": {
                            "model_name": "digits",
                            "model_version": "1",
                            "outputs": [{"name": "logits", "datatype": "FP32", "shape": [1, 10], "data": _LOGITS}],
                        },
                    },
                },
            },
            "application/octet-stream": {
                "schema": _FILE,
                "examples": {
                    "raw": {
                        "summary": "JSON, and behind it ten numbers of 4 bytes",
                        "externalValue": "docs/black.answer",
                    },
                },
            },
        },
        {
            "wrong-shape": {
                "value": {
                    "error": (
                        "[request id: <id_unknown>] unexpected shape for input 'images' for model 'digits'. Expected "
                        "[-1,32,32,3], got [1,2]. NOTE: with a max_batch_size above 0 the first dimension is the batch."
                    ),
                    "code": "invalid_request",
                }
            }
        },
    ),
}


def document_routes(app: FastAPI, options: ServeOptions) -> None:
    """Let `/openapi.json` show the hot routes beside FastAPI's own, examples of all, and the secrets that are required
    now.
    """
    plain = app.openapi

    def openapi() -> _Json:
        if app.openapi_schema is None:
            app.openapi_schema = _completed(plain())
        _say_secrets(app.openapi_schema, options)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _completed(document: _Json) -> _Json:
    """FastAPI's document, with the hot routes and examples."""
    hot = {
        **_hot_paths("predict", PredictionsRoute.paths, _PREDICT),
        **_hot_paths("infer", InferRoute.paths, _INFER),
    }
    document["paths"] = {**hot, **document["paths"]}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            # FastAPI documents its own 422 for every parameter; here such a request gets a 400.
            operation["responses"].pop("422", None)
            add_examples(operation, method, path)
            if path in hot:
                add_unknown_model(operation)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    return document


def _hot_paths(name: str, paths: tuple[str, ...], operation: _Json) -> _Json:
    """One operation at its paths, without a version and with one."""
    names = [
        {"name": name, "in": "path", "required": True, "schema": {"type": kind}}
        for name, kind in (("model", "string"), ("version", "integer"))
    ]
    found: _Json = {}
    for count, path in enumerate(paths, 1):
        own = {"operationId": f"{name}_{count}", "parameters": [*names[:count], *operation["parameters"]]}
        found[path] = {"post": deepcopy({**operation, **own})}
    return found


def _say_secrets(document: _Json, options: ServeOptions) -> None:
    schemes: _Json = {}
    if options.api_keys:
        schemes[_KEY] = {**_BEARER, "description": "One of the server's API keys"}
    if options.admin_token is not None:
        schemes[_TOKEN] = {**_BEARER, "description": "The admin token, for loading and unloading models"}
    document["components"].pop("securitySchemes", None)
    if schemes:
        document["components"]["securitySchemes"] = schemes
    for path, operations in document["paths"].items():
        wanted = [_TOKEN] if takes_admin_token(path) and _TOKEN in schemes else [_KEY] if needs_key(path) else []
        for operation in operations.values():
            operation["security"] = [{name: []} for name in wanted if name in schemes]
