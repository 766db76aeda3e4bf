"""The file of `--config`: YAML to options, not yet checked. Knows no option.

YAML as its version 1.2 has it, where `off` and `no` are words and not false. A key that is there twice is refused,
because one of the two would not count.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from convoy.models.errors import UsageError


class _Loader(yaml.SafeLoader):
    """Plain data, and no objects; keys are text, also those of models called `1`."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            name, line = key.value, key.start_mark.line + 1
            if name in seen:
                raise yaml.MarkedYAMLError(problem=f"{name} is there in line {seen[name]} and again in line {line}")
            seen[name] = line
        return {str(key): value for key, value in super().construct_mapping(node, deep).items()}


# What YAML 1.1 takes for true and false begins with one of these.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool" or first in "tTfF"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_config(path: Path) -> dict[str, Any]:
    """What the file says. Raises UsageError, which names the file."""
    try:
        document = yaml.load(path.read_text(), _Loader)
    except (OSError, ValueError) as error:
        raise UsageError(f"--config {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise UsageError(f"{path} must be options and their values, such as 'port: 8000', one a line")
    return document
