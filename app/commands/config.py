"""`convoy config`: the options that hold and their sources, and the schema of the file."""

from __future__ import annotations

import json
import shutil
import sys

from convoy.app.config.settings import Settings


def show(settings: Settings, as_json: bool) -> None:
    """Print every option that holds."""
    rows = [(one, settings.sources.source_of(*one.keys)) for one in settings.options()]
    if as_json:
        shown = [
            {"option": one.name, "value": one.value, "source": source, "changes_on_sighup": one.changes_on_sighup}
            for one, source in rows
        ]
        print(json.dumps(shown, indent=2, default=str))
        return
    lines = [(one.name, "" if one.value is None else str(one.value), source) for one, source in rows]
    width, widest = max(len(name) for name, _, _ in lines), min(40, max(len(value) for _, value, _ in lines))
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for name, value, source in lines:
        line = f"{name:<{width}}  {value:<{widest}}  {source}"
        # Where a terminal would break a long value, it has a line of its own; others read a line for each option.
        print(line if room is None or len(line) <= room else f"{name:<{width}}  ({source})\n  {value}")


def schema() -> str:
    """The JSON schema of the file."""
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Settings.model_json_schema()}
    document["title"], document["description"] = "Convoy", "The file of `convoy serve --config`."
    del document["properties"]["config"]
    for options in (document, *document["$defs"].values()):
        for one in options["properties"].values():
            one.pop("title", None)  # it says the name once more
    return json.dumps(document, indent=2) + "\n"
