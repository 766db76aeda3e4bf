"""Load and unload models: read the protocol's `parameters` and apply them."""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from convoy.app.core import Core
from convoy.app.lifecycle.catalog import Override
from convoy.app.protocol.tensors import brief
from convoy.models.errors import InvalidRequest, Unsupported
from convoy.models.store import is_version
from convoy.models.version_policy import Latest, Policy

_EXAMPLE = '{"max_batch_size": 16}'
_POLICIES = '{"latest":{}}, {"all":{}} or {"specific":{"versions":[1,2]}}'
# Clients may send a model's configuration back with these fields; they cannot be changed.
_OWN = {
    "platform": ("", "onnxruntime_onnx", "openvino", "tensorrt_plan"),
    "backend": ("", "onnxruntime"),
}


async def load_model(core: Core, model: str, parameters: Mapping[str, object]) -> None:
    """After the mode and the token were checked. Raises RequestError."""
    await core.control.load(model, _override(model, parameters))


async def unload_model(core: Core, model: str, parameters: Mapping[str, object]) -> None:
    """After the mode and the token were checked. Raises RequestError."""
    # Models have no dependents, so a true value needs nothing more.
    if not isinstance(parameters.get("unload_dependents", False), bool):
        raise InvalidRequest("'unload_dependents' must be true or false")
    await core.control.unload(model)


def check_repository(name: str) -> None:
    """Raise Unsupported for a named repository; the only store has no name."""
    if name:
        raise Unsupported("'repository_name' specification is not supported; remove it")


def _override(model: str, parameters: Mapping[str, object]) -> Override:
    """The changed options of a model. Raises InvalidRequest or Unsupported."""
    for name in parameters:
        if name.startswith("file:"):
            raise Unsupported(
                "uploading files with a load request is not supported by this server; put the model into the store"
            )
        if name != "config":
            raise InvalidRequest(f"unrecognized load parameter '{name[:100]}'; the only one is 'config', a JSON string")
    text = parameters.get("config", "{}")
    if not isinstance(text, str):
        raise InvalidRequest(f"'config' must be a JSON string, got {brief(text)}")
    try:
        config = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"'config' is not JSON ({error}); send a string such as {_EXAMPLE}") from error
    if not isinstance(config, dict):
        raise InvalidRequest(f"'config' must hold a JSON object such as {_EXAMPLE}")
    batch, versions = config.pop("max_batch_size", None), config.pop("version_policy", None)
    if (name := config.pop("name", model)) not in (model, ""):
        raise InvalidRequest(f"'name' in 'config' must be '{model[:100]}', got {brief(name)}; remove it")
    for field, known in _OWN.items():
        if (value := config.pop(field, "")) not in known:
            raise InvalidRequest(
                f"'{field}' in 'config' cannot be {brief(value)}: this server only serves ONNX; remove it"
            )
    if config:
        raise Unsupported(
            f"'{min(config)[:100]}' in 'config' cannot be overridden by this server; "
            "max_batch_size and version_policy can"
        )
    return Override(_batch(batch), _policy(versions))


def _batch(value: object) -> int | None:
    """The maximum batch size, a number or a string as in Triton's examples."""
    if value is None:
        return None
    # a 32-bit number has at most ten digits
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 10:
        value = int(value)
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise InvalidRequest(f"'max_batch_size' must be a whole number >= 0, got {brief(value)}")
    return value


def _policy(value: object) -> Policy | None:
    """The version policy. Raises InvalidRequest."""
    if value is None:
        return None
    match list(value.items()) if isinstance(value, dict) else []:
        case [("latest", dict() as latest)] if not latest.keys() - {"num_versions"}:
            if _is_version(count := latest.get("num_versions", 1)):
                return Latest(int(count))
        case [("all", dict())]:
            return "all"
        case [("specific", {"versions": [*versions]})] if versions and all(map(_is_version, versions)):
            return tuple(int(version) for version in versions)
    raise InvalidRequest(f"'version_policy' must be like {_POLICIES}, got {brief(value)}")


def _is_version(value: object) -> bool:
    return type(value) in (int, str) and is_version(str(value))
