"""The sources of options: the command line, the environment, the file, in this order.

Reads and merges them, and knows the source of each value. Knows no options.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from convoy.models.errors import UsageError
from convoy.models.option import is_of_kubernetes
from convoy.models.yaml_file import read_yaml, unknown_option

PREFIX = "CONVOY_"
_Said = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sources:
    """The options given in each place. `lines` are those of the options in the file at `path`.

    `ignored` are variables that Kubernetes set for a Service.
    """

    command_line: _Said = field(default_factory=dict)
    environment: _Said = field(default_factory=dict)
    file: _Said = field(default_factory=dict)
    path: Path | None = None
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @staticmethod
    def read(command_line: _Said, kind: type[BaseModel]) -> Sources:
        """Read the sources of the options of a `kind`. Raises UsageError."""
        environment = _environment(kind)
        ours = {name: value for name, value in os.environ.items() if name.upper().startswith(PREFIX)}
        ignored = tuple(sorted(name for name, value in ours.items() if is_of_kubernetes(name, value)))
        place = command_line.get("config") or environment.get("config")
        if place is None:
            return Sources(command_line, environment, ignored=ignored)
        path = Path(place)
        file, lines = read_yaml(path)
        if "config" in file:
            raise UsageError(f"{path}: config: a file cannot name another file; remove it")
        return Sources(command_line, environment, file, path, lines, ignored)

    def merged(self) -> dict[str, Any]:
        """One value per option; options by name, such as models, are merged by name."""
        return _over(self.command_line, _over(self.environment, self.file))

    def source_of(self, *keys: str) -> str:
        """The source of an option, as text. `keys` lead to it, such as `models`, `digits`, `max_queue`."""
        if _has(self.command_line, keys):
            return "command line"
        if _has(self.environment, keys):
            return f"environment {PREFIX}{keys[0].upper()}"
        return f"file {self.path}" if _has(self.file, keys) else "default"

    def not_valid(self, error: ValidationError, kind: type[BaseModel]) -> UsageError:
        """All mistakes, a line each: where it was given, under which name, and what to write there."""
        found = sorted(error.errors(), key=lambda one: self.lines.get(tuple(map(str, one["loc"])), 0))
        return UsageError("\n".join(dict.fromkeys(self._mistake(one, kind) for one in found)))

    def _mistake(self, first: Any, kind: type[BaseModel]) -> str:
        keys = tuple(map(str, first["loc"]))
        words = first["msg"].removeprefix("Value error, ")
        if not keys:
            return f"{self.path}: {words}" if self.path is not None and self.file else f"options: {words}"
        options = _options_at(keys, kind)
        if first["type"] == "extra_forbidden":
            words = unknown_option(keys[-1], {*options} - {"config"})
        if first["type"] in ("dict_type", "model_type"):
            words = "must be a mapping of names to values, indented below it"
        if _has(self.command_line, keys):
            return f"--{keys[0].replace('_', '-')}: {words}"
        if _has(self.environment, keys):
            return f"{'.'.join((PREFIX + keys[0].upper(), *keys[1:]))}: {words}"
        words = f"{'.'.join(keys)}: {words}"
        if not _has(self.file, keys):
            return words
        option = options.get(keys[-1])
        help_text = f" ({option.description})" if option is not None and option.description else ""
        line = f", line {self.lines[keys]}" if keys in self.lines else ""
        is_value = first["type"] != "extra_forbidden" and isinstance(first["input"], str | int | float)
        value = f", got {first['input']!r}" if is_value else ""
        return f"{self.path}{line}: {words}{value}{help_text}"


def _environment(kind: type[BaseModel]) -> dict[str, Any]:
    """Raises UsageError."""
    asked: Any = type(kind.__name__, (kind, BaseSettings), {"model_config": SettingsConfigDict(env_prefix=PREFIX)})
    source = EnvSettingsSource(asked)
    source.env_vars = {name: text for name, text in source.env_vars.items() if not is_of_kubernetes(name, text or "")}
    try:
        return source()
    except SettingsError as error:
        raise UsageError(f"cannot read the environment: {error}; write the value as JSON") from error


def _over(said: _Said, below: _Said) -> dict[str, Any]:
    merged = dict(below)
    for key, value in said.items():
        before = merged.get(key)
        is_both = isinstance(value, Mapping) and isinstance(before, Mapping)
        merged[key] = _over(value, before) if is_both else value  # type: ignore[arg-type]
    return merged


def _has(said: Any, keys: tuple[str, ...]) -> bool:
    """Whether an option was given, or something in its place without such keys."""
    for key in keys:
        if not isinstance(said, Mapping):
            return True
        if key not in said:
            return False
        said = said[key]
    return True


def _options_at(keys: tuple[str, ...], kind: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """The options that contain the last of the keys; none below an option with plain values."""
    options = kind.model_fields
    if len(keys) == 1 or keys[0] not in options:
        return options
    inner = [one for one in get_args(options[keys[0]].annotation) if isinstance(one, type)]
    return next((one.model_fields for one in inner if issubclass(one, BaseModel)), {})
