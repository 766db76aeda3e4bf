"""Read a YAML file of options: plain data, with the line of each option for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from convoy.models.errors import UsageError


class YamlOptions(NamedTuple):
    """`values` by option, and the line (from 1) of each option, by the keys that lead to it."""

    values: Mapping[str, Any]
    lines: Mapping[tuple[str, ...], int]


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Plain data without objects. Keys are text, also for models with names such as `1`."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem=f"line {key.start_mark.line + 1} has a key that is not a string")
            name, line = key.value, key.start_mark.line + 1
            if name in seen:
                raise yaml.MarkedYAMLError(problem=f"{name} is set in line {seen[name]} and again in line {line}")
            seen[name] = line
        return {str(key): value for key, value in super().construct_mapping(node, deep).items()}


# YAML 1.1 also reads yes, no, on and off as booleans, 0224 as octal and 1:30 as 90. Here these are text.
_DECIMAL = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$")
_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, _DECIMAL if tag == "tag:yaml.org,2002:int" else pattern)
        for tag, pattern in resolvers
        if tag != "tag:yaml.org,2002:bool" or first in "tTfF"
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def unknown_option(name: str, known: Iterable[str]) -> str:
    """What to say of an option that does not exist: the nearest one that does, or all of them."""
    options = sorted(known)
    near = get_close_matches(name.replace("-", "_"), options, 1)
    return f"unknown option; {f'did you mean {near[0]}?' if near else 'the options are ' + ', '.join(options)}"


def read_yaml(path: Path) -> YamlOptions:
    """Read the options of a file; an empty file has none. Raises UsageError, which names the file."""
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, _Loader)
        document = yaml.load(text, _Loader)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read --config {path}: {error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if document is None:
        return YamlOptions({}, {})
    if not isinstance(document, dict):
        raise UsageError(f"{path} must be a mapping of options to values, one per line, such as 'port: 8000'")
    assert isinstance(node, yaml.MappingNode)
    return YamlOptions(document, dict(_lines(node)))


def _lines(node: yaml.MappingNode, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    for key, value in node.value:
        keys = (*above, str(key.value))
        yield keys, key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            yield from _lines(value, keys)
