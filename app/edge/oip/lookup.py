"""From the names in a request to the version that is served; the same for every route and both wires."""

from __future__ import annotations

from convoy.app.lifecycle.catalog import Catalog, Served
from convoy.models.errors import NotFound


def find_served(catalog: Catalog, model: str, version: str | None) -> Served:
    """The version asked for; without one, the highest. Raises NotFound or Unavailable."""
    if version is None:
        return catalog.find(model, None)
    if not version:
        told = "the version is empty; give its number, or leave the version out, with the slash before it"
        raise NotFound(f"Request for unknown model: '{model}': {told}")
    if not (version.isascii() and version.isdigit() and len(version) < 10):
        shown = version[:40] if version.isprintable() and " " not in version else repr(version[:40])
        raise NotFound(f"Request for unknown model: '{model}' version {shown} is not found")
    return catalog.find(model, int(version))
