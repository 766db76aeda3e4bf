"""`convoy config`: the effective options with their sources, and the schema of the file."""

from __future__ import annotations

import json
import re

from convoy.app.config.settings import Settings

# A URL may contain a user and a password.
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def show(settings: Settings, as_json: bool) -> None:
    """Print every setting, its value and its source."""
    rows = [(one, settings.sources.source_of(*one.keys)) for one in settings.options()]
    if as_json:
        shown = [
            {
                "option": one.name,
                "value": _masked(one.value),
                "source": source,
                "changes_on_sighup": one.changes_on_sighup,
            }
            for one, source in rows
        ]
        print(json.dumps(shown, indent=2, default=str))
        return
    width = max(len(one.name) for one, _ in rows)
    if (path := settings.sources.path) is not None:
        print(f"file: {path}\n")
    # The value is last, so only a long path exceeds 80 columns.
    print(f"{'setting':<{width}}  {'from':<12}  value")
    for one, source in rows:
        place = source if source == "command line" else source.partition(" ")[0]
        print(f"{one.name:<{width}}  {place:<12}  {_in_words(_masked(one.value))}")


def _masked(value: object) -> object:
    return _CREDENTIALS.sub("***", value) if isinstance(value, str) else value


def _in_words(value: object) -> str:
    match value:
        case None | "":
            return "-"
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
    return str(value)


def schema() -> str:
    """The JSON schema of the file."""
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Settings.model_json_schema()}
    document["title"], document["description"] = "Convoy", "The file of `convoy serve --config`."
    del document["properties"]["config"]
    for options in (document, *document["$defs"].values()):
        for one in options["properties"].values():
            one.pop("title", None)  # it repeats the name
    return json.dumps(document, indent=2) + "\n"
