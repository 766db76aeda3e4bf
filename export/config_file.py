"""The options of an export as a YAML file (`--config`), and as the command line that repeats it."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from convoy.export.options import ExportOptions, flag_of, option_of
from convoy.models.errors import UsageError
from convoy.models.yaml_file import read_yaml, unknown_option

# The file in every bundle that repeats its export.
EXPORT_FILE = "export.yaml"
# Options that are not part of the export, and places of secrets and caches.
_OF_THIS_MACHINE = ("data_root", "plan_cache", "remeasure", "sign")
# `crop: 224` is the text "224", as on the command line.
_AS_TYPED = ConfigDict(coerce_numbers_to_str=True)


def read_options(path: Path) -> dict[str, Any]:
    """The options in a file by the fields of `ExportOptions`.

    Raises UsageError, which names every option that is unknown or has a wrong value, with its line.
    """
    values, lines = read_yaml(path)
    hints = get_type_hints(ExportOptions)
    known = {_key(field.name): field.name for field in fields(ExportOptions)}
    found: dict[str, Any] = {}
    wrong: list[str] = []
    for key, value in values.items():
        name = key.replace("-", "_")
        where = f"{path}, line {lines[key,]}: {key}"
        if name not in known:
            wrong.append(f"{where}: {unknown_option(name, known)}")
            continue
        field = known[name]
        words = option_of(field).words
        try:
            found[field] = TypeAdapter(hints[field], config=_AS_TYPED).validate_python(_joined(name, value))
        except ValidationError as error:
            wrong.append(f"{where}: {value!r} is not valid: {error.errors()[0]['msg']}")
            continue
        if words and found[field] not in words:
            wrong.append(f"{where}: {value!r} is not valid: use {', '.join(words)}")
    if wrong:
        raise UsageError("\n".join(wrong))
    return found


def _joined(key: str, value: Any) -> Any:
    """A list as written on the command line: `[0.5, 0.5, 0.5]` as `0.5,0.5,0.5`, a size as `224x192`."""
    between = "x" if key in ("crop", "input", "resize") else ","
    return between.join(map(str, value)) if isinstance(value, list) else value


def as_yaml(options: ExportOptions, left_out: Collection[str] = ()) -> str:
    """The options that differ from their defaults, as `--config` reads them, without the fields in `left_out`.

    Places of keys and caches are left out as well, because the file goes with the bundle.
    """
    said = {
        _key(name): str(value) if isinstance(value, Path) else value
        for name, value in _given(options).items()
        if name not in {*_OF_THIS_MACHINE, *left_out}
    }
    head = "# Repeat this export from the same folder: convoy export --config FILE\n"
    if left_out:
        head = f"# Exported from Python; pass {', '.join(left_out)} again to convoy.export().\n"
    return head + str(yaml.safe_dump(said, sort_keys=False, allow_unicode=True))


def as_command(options: ExportOptions, more: Mapping[str, str]) -> str:
    """The command line with these options, and those of `more` (flag to value) at its end."""
    words = ["convoy", "export"]
    for name, value in _given(options).items():
        flag = flag_of(name)
        if flag == "SOURCE":
            words.append(str(value))
        elif value is True:
            words.append(flag)
        elif flag not in more:
            words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    added = [word for pair in more.items() for word in pair if word]
    return shlex.join([*words, *added])


def _key(field: str) -> str:
    """A field's name in the file, which is its option's name."""
    return field if option_of(field).is_argument else flag_of(field).removeprefix("--").replace("-", "_")


def _given(options: ExportOptions) -> dict[str, Any]:
    values = {field.name: (getattr(options, field.name), field.default) for field in fields(options)}
    return {name: value for name, (value, default) in values.items() if value != default}
