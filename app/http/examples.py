"""What each operation is asked, and what it answers, with the demo's model: examples that run.

An example of a request and the answer to it have the same name. `externalValue` is a file of this server's, which is
the body, or of a form the field `file`; `x-headers` go with it. A test sends all of them to a server on localhost with
`--model-control explicit` and `--allow-shared-memory`.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from pydantic import BaseModel

from convoy.app.protocol.documents import CUDA_IS_NOT_OFFERED

_Json = dict[str, Any]
MAIN, UNKNOWN = "digits", "unknown"
# The demo's input, as its bytes, and where it is fetched.
BLACK_PICTURE, BLACK_PICTURE_FILE = bytes(32 * 32 * 3), "black.bin"
_VALUES = {"model": "digits", "version": "1", "name": "input", "repository": "other"}
_ANOTHER_MODEL = "nothing"
_NO_MODEL = f"Request for unknown model: '{_ANOTHER_MODEL}'%s is not found; available: {MAIN}"


class ErrorBody(BaseModel):
    """Every error on every route."""

    error: str


# The errors of the routes that FastAPI documents.
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in (
        (400, "The request is wrong"),
        (401, "The API key is missing or wrong"),
        (403, "A web page of somebody else's asks"),
        (404, "There is no such model, version, region or page"),
        (413, "The body is too large"),
        (501, "An extension that is not offered"),
        (503, "Not ready"),
    )
}


# Extensions that clients may ask for, and why there is none.
NOT_OFFERED = {
    "/v2/trace/setting": "the server does not support tracing; /stats and the Server-Timing header tell the stages",
    "/v2/models/{model}/trace/setting": "the server does not support tracing; see /stats and Server-Timing",
    "/v2/models/{model}/versions/{version}/trace/setting": (
        "the server does not support tracing; see /stats and Server-Timing"
    ),
    "/v2/logging": "the server does not support dynamic logging; start it with --log-level or --access-log",
}


class Said(NamedTuple):
    """One operation: its answer and the form of that, and of its body, where it has one. `answer` None: no content."""

    answer: Any = None
    schema: _Json | None = None
    status: int = 200
    body: _Json | None = None
    body_schema: _Json | None = None
    knows_models: bool = False


def obj(*required: str, **properties: _Json) -> _Json:
    """The schema of an object that has at least these."""
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
ERROR = obj("error", error=TEXT)


def _error(status: int, words: str) -> Said:
    return Said({"error": words}, ERROR, status)


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
_NO_REPOSITORY = _error(501, "'repository_name' specification is not supported; leave it out")
# By method and path, without the version where there is a path with one and one without.
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
    "post /v2/repository/{repository}/index": _NO_REPOSITORY,
    "post /v2/repository/{repository}/models/{model}/load": _NO_REPOSITORY,
    "post /v2/repository/{repository}/models/{model}/unload": _NO_REPOSITORY,
    "get /v2/systemsharedmemory/status": _REGIONS,
    "get /v2/systemsharedmemory/region/{name}/status": _REGIONS,
    "post /v2/systemsharedmemory/region/{name}/register": Said(
        body={"key": "/convoy-example", "offset": 0, "byte_size": 3072},
        body_schema=obj("key", "byte_size", key=TEXT, offset=COUNT, byte_size=COUNT),
    ),
    "post /v2/systemsharedmemory/region/{name}/unregister": Said(),
    "post /v2/systemsharedmemory/unregister": Said(),
    "get /v2/cudasharedmemory/status": Said([], array(_REGION)),
    "get /v2/cudasharedmemory/region/{name}/status": _error(404, "Unable to find cuda shared memory region: 'input'"),
    "post /v2/cudasharedmemory/region/{name}/register": _error(501, CUDA_IS_NOT_OFFERED),
    "post /v2/cudasharedmemory/region/{name}/unregister": Said(),
    "post /v2/cudasharedmemory/unregister": Said(),
    **{f"{method} {path}": _error(501, why) for path, why in NOT_OFFERED.items() for method in ("get", "post")},
}
_VERSION = re.compile(r"/versions/\{version\}|(?<=/models/\{model\})/\{version\}")


def add_examples(operation: _Json, method: str, path: str) -> None:
    """The names in the path with the demo's, and what a route that does not infer is asked and answers."""
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
    if said.status != 200:
        del responses["200"]  # which FastAPI promises of everything
    if said.answer is None:
        responses["200"].pop("content", None)
    else:
        content = responses[str(said.status)]["content"]["application/json"]
        if said.status == 200:
            content["schema"] = said.schema
        content["examples"] = {MAIN: {"value": said.answer}}
    if said.body is not None:
        content = {"schema": said.body_schema, "examples": {MAIN: {"value": said.body}}}
        operation["requestBody"] = {"content": {"application/json": content}}
    if said.knows_models:
        add_unknown_model(operation)


def add_unknown_model(operation: _Json) -> None:
    """What is answered where there is no such model."""
    names = {one["name"]: one for one in operation["parameters"] if one["in"] == "path"}
    for name, one in names.items():
        one["examples"][UNKNOWN] = {"value": _ANOTHER_MODEL if name == "model" else _VALUES[name]}
    which = f" version {_VALUES['version']}" if "version" in names else ""
    content = operation["responses"]["404"]["content"]["application/json"]
    content.setdefault("examples", {})[UNKNOWN] = {"value": {"error": _NO_MODEL % which}}
