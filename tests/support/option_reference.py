"""Write the generated half of docs/configuration.md: every option of `convoy serve`, from its settings.

`make reference` runs it. The text above the marker is written by hand and stays.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from convoy.app.commands.config import schema
from convoy.app.config.settings import LIVE, OPTION_GROUPS, Settings
from convoy.app.config.sources import PREFIX
from tests.support.stores import ROOT

PAGE = ROOT / "docs" / "configuration.md"
MARKER = "<!-- `make reference` writes everything below this line. -->\n"
_HEAD = "Type | Default | Description |\n|---|---|---|---|"
# Of JSON schema, the richest first: a list may be written as text, and text as a number.
_TYPES = {
    "array": "list",
    "string": "text",
    "boolean": "`true` or `false`",
    "object": "names with values",
    "number": "number",
    "integer": "integer",
}
# By the end of an option's name.
_UNITS = {"_ms": "milliseconds", "_s": "seconds", "_mb": "MiB (integer)"}
_LIMITS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to"}


def renewed(page: str) -> str:
    """The page with its reference made anew."""
    return "\n".join((page.partition(MARKER)[0] + MARKER, *_reference(), ""))


def _reference() -> Iterator[str]:
    of_file = json.loads(schema())
    of_model = of_file["$defs"]["ModelSettings"]["properties"]
    options = {**Settings.model_json_schema()["properties"], **of_file["properties"]}
    for group, names in OPTION_GROUPS.items():
        yield f"### {group}\n\n| Option, YAML key, environment variable | {_HEAD}"
        yield from (_row(_names(name), name, options[name], _default(options[name])) for name in names)
        yield ""
    yield "### Keys and models\n\nIn the environment, these are JSON objects.\n"
    yield f"| YAML key, environment variable | {_HEAD}"
    for name in ("keys", "models"):
        yield _row(f"`{name}`<br>`{_variable(name)}`", name, options[name], "none")
    yield f"\n### Options of one model\n\n| YAML key | {_HEAD}"
    for name, option in of_model.items():
        default = "the server's" if name in options else "the model's own"
        yield _row(f"`models.NAME.{name}`", name, option, default)


def _names(name: str) -> str:
    flag = f"`--{name.replace('_', '-')}`"
    return "<br>".join((flag, *([f"`{name}`"] if name != "config" else []), f"`{_variable(name)}`"))


def _variable(name: str) -> str:
    return f"{PREFIX}{name.upper()}"


def _row(names: str, name: str, option: dict[str, Any], default: str) -> str:
    text, _, own_default = option["description"].rstrip(".").replace("*", r"\*").partition("; default: ")
    live = " *Reloadable.*" if LIVE.items() <= option.items() else ""
    return f"| {names} | {_type(name, option)} | {own_default or default} | {text}.{live} |"


def _default(option: dict[str, Any]) -> str:
    default = option.get("default")
    return "none" if default in (None, "") else f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _type(name: str, option: dict[str, Any]) -> str:
    """The kind of value, or its choices, with its unit and limits."""
    kinds = {one["type"]: {**option, **one} for one in option.get("anyOf", [option])}
    kind = next(kinds[word] for word in _TYPES if word in kinds)
    if "enum" in kind:
        return ", ".join(f"`{word}`" for word in kind["enum"])
    word = "path" if kind.get("format") == "path" else _TYPES[kind["type"]]
    if kind["type"] in ("integer", "number"):
        word = next((unit for end, unit in _UNITS.items() if name.endswith(end)), word)
    limits = [f"{said} {kind[limit]}" for limit, said in _LIMITS.items() if limit in kind]
    return f"{word}, {' '.join(limits)}" if limits else word


if __name__ == "__main__":
    (ROOT / "docs" / "config.schema.json").write_text(schema())
    PAGE.write_text(renewed(PAGE.read_text()))
