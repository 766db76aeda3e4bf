"""The manifests in docs/deploy, and the schemas that they are held to: strictly, so that no field is misspelt."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from tests.support.stores import DATA, ROOT

DEPLOY = ROOT / "docs" / "deploy"
# Beside these everything there is a manifest; the tools of their own judge them.
OTHERS = ("kustomization.yaml", "envoy.yaml")
# What a patch leaves out is in what it patches.
PATCHES = ("gpu.yaml", "replicas.yaml", "store.yaml")
KUBERNETES = "1.37"
Document = dict[str, Any]


def documents(path: Path) -> list[Document]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def manifests() -> list[Path]:
    return sorted(path for path in DEPLOY.rglob("*.yaml") if path.name not in OTHERS)


def document(path: str, kind: str) -> Document:
    """The one of this kind in a file of docs/deploy."""
    (found,) = [one for one in documents(DEPLOY / path) if one["kind"] == kind]
    return found


@cache
def definition(api_version: str, kind: str) -> Any:
    """The schema of another project's resource as JSON Schema, in which what is not named is not allowed; or None."""
    path = DATA / "crds" / f"{kind}.{api_version.rpartition('/')[2]}.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    assert (found["apiVersion"], found["kind"]) == (api_version, kind)
    schema = _strict({**found["schema"], "$defs": found["$defs"]})
    schema["properties"]["metadata"] = _METADATA
    return schema


_METADATA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "namespace": {"type": "string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _strict(value) for name, value in schema.items()}
    is_open = "additionalProperties" in found or found.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(found.get("properties"), dict) and found.get("type") == "object" and not is_open:
        found["additionalProperties"] = False
    return found


def check(one: Document) -> None:
    """Raises ValidationError, of jsonschema or its subclass of kubernetes-validate."""
    schema = definition(one["apiVersion"], one["kind"])
    if schema is None:
        kubernetes_validate.validate(one, KUBERNETES, strict=True)
    else:
        jsonschema.Draft202012Validator(schema).validate(one)
