"""Examples of each operation's requests and responses with the demo model, which can be run.

A request and its response have the same name. `externalValue` is a file of this server, which is the body or, in a
form, the field `file`; `x-headers` belong to it. A test sends all of them to a server on localhost with
`--model-control explicit` and `--allow-shared-memory`.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from pydantic import BaseModel, Field, JsonValue

from convoy.models.errors import error_kinds

_Json = dict[str, Any]
MAIN, UNKNOWN = "digits", "unknown"
# The demo's input: its bytes, and its path.
BLACK_PICTURE, BLACK_PICTURE_FILE = bytes(32 * 32 * 3), "black.bin"
_VALUES = {"model": "digits", "version": "1", "name": "input", "repository": "other"}
_ANOTHER_MODEL = "nothing"
_NO_MODEL = f"Request for unknown model: '{_ANOTHER_MODEL}'%s is not found; available: {MAIN}"


CODES: list[JsonValue] = [*sorted(error_kinds())]


class ErrorBody(BaseModel):
    """The body of every error: a sentence that says what to do, and a code for programs."""

    error: str
    code: str = Field(json_schema_extra={"enum": CODES})


# The errors of the routes that FastAPI documents.
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in (
        (400, "The request is wrong"),
        (401, "The API key is missing or wrong"),
        (403, "A web page from another origin sent the request"),
        (404, "There is no such model, version, region or page"),
        (413, "The body is too large"),
        (501, "An extension that is not offered"),
        (503, "Not ready"),
    )
}


class Said(NamedTuple):
    """One operation: its response and the schema of that, and of its body, if it has one. `answer` None means no
    content.
    """

    answer: Any = None
    schema: _Json | None = None
    body: _Json | None = None
    body_schema: _Json | None = None
    knows_models: bool = False


def obj(*required: str, **properties: _Json) -> _Json:
    """The schema of an object with at least these properties."""
    return {"type": "object", "required": [*required], "properties": properties}


def array(items: _Json) -> _Json:
    """The schema of a list."""
    return {"type": "array", "items": items}


TEXT, FLAG, COUNT, OBJECT = (
    {"type": "string"},
    {"type": "boolean"},
    {"type": "integer", "minimum": 0},
    {"type": "object"},
)
ERROR = obj("error", "code", error=TEXT, code={"type": "string", "enum": CODES})


_TENSOR = obj("name", "datatype", "shape", name=TEXT, datatype=TEXT, shape=array({"type": "integer"}))
_REGION = obj("name", "key", "offset", "byte_size", name=TEXT, key=TEXT, offset=COUNT, byte_size=COUNT)
_REGIONS = Said([{"name": "input", "key": "/convoy-example", "offset": 0, "byte_size": 3072}], array(_REGION))
_TIMES = {"count": 4, "ns": 1497801}
_COUNTERS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
_STATISTICS = Said(
    {
        "model_stats": [
            {
                "name": "digits",
                "version": "1",
                "last_inference": 1767225600000,
                "inference_count": 4,
                "execution_count": 4,
                "inference_stats": dict.fromkeys(_COUNTERS, _TIMES),
                "batch_stats": [{"batch_size": 1, "compute_infer": _TIMES}],
            }
        ]
    },
    obj(
        "model_stats",
        model_stats=array(
            obj(
                *("name", "version", "inference_count", "execution_count", "inference_stats", "batch_stats"),
                inference_stats={"type": "object", "additionalProperties": obj("count", "ns", count=COUNT, ns=COUNT)},
            )
        ),
    ),
    knows_models=True,
)
_METADATA = Said(
    {
        "name": "digits",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "images", "datatype": "UINT8", "shape": [-1, 32, 32, 3]}],
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [-1, 10]}],
    },
    obj("name", "versions", "platform", "inputs", "outputs", inputs=array(_TENSOR), outputs=array(_TENSOR)),
    knows_models=True,
)
# By method and path; without the version if there is a path with one and one without.
_SAID = {
    "get /v2/health/live": Said({"live": True}, obj("live", live=FLAG)),
    "get /v2/health/ready": Said({"ready": True}, obj("ready", ready=FLAG)),
    "get /ping": Said({"status": "Healthy"}, obj("status", status=TEXT)),
    "get /v2/models/{model}/ready": Said(
        {"name": "digits", "ready": True}, obj("name", "ready", name=TEXT, ready=FLAG), knows_models=True
    ),
    "get /v2": Said(
        {"name": "convoy", "version": "0.1.0", "extensions": ["classification", "binary_tensor_data"]},
        obj("name", "version", "extensions", name=TEXT, version=TEXT, extensions=array(TEXT)),
    ),
    "get /v2/models/{model}": _METADATA,
    "get /v2/models/{model}/config": Said(
        {
            "name": "digits",
            "platform": "onnxruntime_onnx",
            "max_batch_size": 64,
            "input": [{"name": "images", "data_type": "TYPE_UINT8", "dims": [32, 32, 3]}],
            "output": [{"name": "logits", "data_type": "TYPE_FP32", "dims": [10]}],
        },
        obj("name", "platform", "max_batch_size", "input", "output", input=array(OBJECT), output=array(OBJECT)),
        knows_models=True,
    ),
    "get /v2/models/stats": _STATISTICS._replace(knows_models=False),
    "get /v2/models/{model}/stats": _STATISTICS,
    "get /stats": Said(
        {"version": "0.1.0", "ready": True, "uptime_s": 4.9, "open_calls": 0, "inflight_bytes": 0, "models": []},
        obj("version", "ready", "uptime_s", "open_calls", "inflight_bytes", "models", models=array(OBJECT)),
    ),
    "get /store": Said(
        {"models": [{"name": "digits", "versions": ["1"]}]},
        obj("models", models=array(obj("name", "versions", name=TEXT, versions=array(TEXT)))),
    ),
    "get /models": Said(
        {"models": [{"modelName": "digits", "modelUrl": "/v2/models/digits"}]},
        obj("models", models=array(obj("modelName", "modelUrl", modelName=TEXT, modelUrl=TEXT))),
    ),
    "get /models/{model}": Said(
        [
            {
                "modelName": "digits",
                "modelVersion": "1",
                "modelUrl": "/v2/models/digits",
                "batchSize": 64,
                "minWorkers": 1,
            }
        ],
        array(obj("modelName", "modelVersion", "modelUrl", "batchSize", "minWorkers")),
        knows_models=True,
    ),
    "post /v2/repository/index": Said(
        [{"name": "digits", "version": "1", "state": "READY", "reason": ""}],
        array(obj("name", "state", "reason", name=TEXT, version=TEXT, state=TEXT, reason=TEXT)),
        body={"ready": True},
        body_schema=obj(ready=FLAG),
    ),
    "post /v2/repository/models/{model}/load": Said(
        body={"parameters": {"config": '{"max_batch_size": 16}'}}, body_schema=obj(parameters=OBJECT)
    ),
    "post /v2/repository/models/{model}/unload": Said(
        body={"parameters": {"unload_dependents": False}}, body_schema=obj(parameters=OBJECT)
    ),
    "get /v2/systemsharedmemory/status": _REGIONS,
    "get /v2/systemsharedmemory/region/{name}/status": _REGIONS,
    "post /v2/systemsharedmemory/region/{name}/register": Said(
        body={"key": "/convoy-example", "offset": 0, "byte_size": 3072},
        body_schema=obj("key", "byte_size", key=TEXT, offset=COUNT, byte_size=COUNT),
    ),
    "post /v2/systemsharedmemory/region/{name}/unregister": Said(),
    "post /v2/systemsharedmemory/unregister": Said(),
}
_VERSION = re.compile(r"/versions/\{version\}|(?<=/models/\{model\})/\{version\}")


def add_examples(operation: _Json, method: str, path: str) -> None:
    """Add the demo's names to paths, and requests and responses of the routes that do not infer."""
    parameters = operation.setdefault("parameters", [])
    known = {one["name"]: one for one in parameters if one["in"] == "path"}
    for name in re.findall(r"\{(\w+)\}", path):
        if name not in known:
            known[name] = {"name": name, "in": "path", "required": True, "schema": TEXT}
            parameters.append(known[name])
        known[name]["examples"] = {MAIN: {"value": _VALUES[name]}}
    said = _SAID.get(f"{method} {_VERSION.sub('', path)}")
    if said is None:
        return
    responses = operation["responses"]
    if said.answer is None:
        responses["200"].pop("content", None)
    else:
        content = responses["200"]["content"]["application/json"]
        content |= {"schema": said.schema, "examples": {MAIN: {"value": said.answer}}}
    if said.body is not None:
        content = {"schema": said.body_schema, "examples": {MAIN: {"value": said.body}}}
        operation["requestBody"] = {"content": {"application/json": content}}
    if said.knows_models:
        add_unknown_model(operation)


def add_unknown_model(operation: _Json) -> None:
    """Add the response for an unknown model."""
    names = {one["name"]: one for one in operation["parameters"] if one["in"] == "path"}
    for name, one in names.items():
        one["examples"][UNKNOWN] = {"value": _ANOTHER_MODEL if name == "model" else _VALUES[name]}
    which = f" version {_VALUES['version']}" if "version" in names else ""
    content = operation["responses"]["404"]["content"]["application/json"]
    content.setdefault("examples", {})[UNKNOWN] = {"value": {"error": _NO_MODEL % which, "code": "unknown_model"}}
