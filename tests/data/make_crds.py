"""The schemas of other projects' resources that our manifests use, from their own definitions, made small.

    python -m tests.data.make_crds PROJECT VERSION CRD.yaml...

Descriptions are left out and equal parts are written once; nothing else is changed. Each project is under the Apache
License 2.0, and the files say which version of what they are.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "crds"
# Below that a reference is not shorter.
_LEAST_LETTERS = 120


def reduced(schema: Any, inside_properties: bool = False) -> Any:
    """Without what is said to people only. A property may be called `description`."""
    if isinstance(schema, list):
        return [reduced(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        name: value for name, value in schema.items() if inside_properties or name not in ("description", "example")
    }
    return {
        name: reduced(value, inside_properties=name == "properties" and not inside_properties)
        for name, value in kept.items()
    }


class Shared:
    """Writes what occurs several times once."""

    def __init__(self, schema: Any) -> None:
        self._counts: Counter[str] = Counter()
        self._names: dict[str, str] = {}
        self.definitions: dict[str, Any] = {}
        self._count(schema)

    def _count(self, schema: Any) -> None:
        if isinstance(schema, dict):
            text = json.dumps(schema, sort_keys=True)
            self._counts[text] += 1
            if self._counts[text] > 1:
                return
        for one in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
            self._count(one)

    def written(self, schema: Any, *, is_schema: bool = True) -> Any:
        """The schema with references; only what stands where a schema stands may be one."""
        if isinstance(schema, list):
            return [self.written(one) for one in schema]
        if not isinstance(schema, dict):
            return schema
        text = json.dumps(schema, sort_keys=True)
        is_named = is_schema and self._counts[text] > 1 and len(text) > _LEAST_LETTERS
        if is_named and text in self._names:
            return {"$ref": f"#/$defs/{self._names[text]}"}
        if is_named:
            self._names[text] = str(len(self._names))
        whole = {
            name: self.written(value, is_schema=not is_schema or name != "properties") for name, value in schema.items()
        }
        if not is_named:
            return whole
        self.definitions[self._names[text]] = whole
        return {"$ref": f"#/$defs/{self._names[text]}"}


def main(project: str, version: str, *paths: str) -> None:
    for path in paths:
        definition = yaml.safe_load(Path(path).read_text())
        spec = definition["spec"]
        for one in spec["versions"]:
            if not one["served"]:
                continue
            schema = reduced(one["schema"]["openAPIV3Schema"])
            shared = Shared(schema)
            document = {
                "source": f"https://github.com/{project}",
                "version": version,
                "licence": "Apache-2.0",
                "group": spec["group"],
                "apiVersion": f"{spec['group']}/{one['name']}",
                "kind": spec["names"]["kind"],
                "schema": shared.written(schema),
                "$defs": shared.definitions,
            }
            target = FOLDER / f"{spec['names']['kind']}.{one['name']}.json"
            target.write_text(json.dumps(document, separators=(",", ":")) + "\n")
            print(f"{target.name}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
