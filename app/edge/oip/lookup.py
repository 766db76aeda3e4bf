"""From the names in a request to the version that is served; the same for every route and both wires."""

from __future__ import annotations

from convoy.app.submission.inference import Finder, Found
from convoy.models.errors import NotFound


def find_served(catalog: Finder[Found], model: str, version: str | None) -> Found:
    """The version asked for; without one, the highest. Raises NotFound or Unavailable."""
    if version is None:
        return catalog.find(model, None)
    if not (version.isascii() and version.isdigit() and len(version) < 10):
        raise NotFound(f"Request for unknown model: '{model}' version {version[:40]} is not found")
    return catalog.find(model, int(version))
