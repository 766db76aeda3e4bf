"""`convoy config`: what holds and whence, and the schema of the file."""

from __future__ import annotations

import json
import shutil
import sys
from typing import Any, NamedTuple

from convoy.app.config.settings import Settings


class Shown(NamedTuple):
    """One option: its value, who said it, and whether SIGHUP can change it."""

    option: str
    value: Any
    whence: str
    changes_on_sighup: bool


def show(settings: Settings, as_json: bool) -> None:
    """Print every option that holds."""
    rows = [
        Shown(one.name, one.value, settings.sources.whence(*one.keys), one.changes_on_sighup)
        for one in settings.options()
    ]
    if as_json:
        print(json.dumps([row._asdict() for row in rows], indent=2, default=str))
        return
    values = ["" if row.value is None else str(row.value) for row in rows]
    width, widest = max(len(row.option) for row in rows), min(40, max(map(len, values)))
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row, value in zip(rows, values, strict=True):
        line = f"{row.option:<{width}}  {value:<{widest}}  {row.whence}"
        # Where a terminal would break a long value, it has a line of its own; others read a line for each option.
        print(line if room is None or len(line) <= room else f"{row.option:<{width}}  ({row.whence})\n  {value}")


def schema() -> str:
    """The JSON schema of the file."""
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Settings.model_json_schema()}
    document["title"], document["description"] = "Convoy", "The file of `convoy serve --config`."
    del document["properties"]["config"]
    for options in (document, *document["$defs"].values()):
        for one in options["properties"].values():
            one.pop("title", None)  # it says the name once more
    return json.dumps(document, indent=2) + "\n"
