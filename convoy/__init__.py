"""Convoy takes a trained CNN, optimises it for the device it will run on, proves that it is still right, and serves it.

Everything is imported as `convoy.app`, `convoy.export`, `convoy.models` and `convoy.loadtest`, so that a project may
have its own packages of those names. In a checkout these four are links to the folders at its top; in a wheel they are
ordinary folders.

The public names are here, and each is imported when it is first used: `Engine`, `Client` and `AsyncClient`, their
results and their errors.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convoy.app.client.client import AsyncClient as AsyncClient
    from convoy.app.client.client import Client as Client
    from convoy.app.client.records import RemoteModel as RemoteModel
    from convoy.app.python.engine import PythonEngine as Engine
    from convoy.app.python.records import ModelSummary as ModelSummary
    from convoy.export.python import ExportResult as ExportResult
    from convoy.export.python import export as export
    from convoy.models.answers import Box as Box
    from convoy.models.answers import Classification as Classification
    from convoy.models.answers import ClassShare as ClassShare
    from convoy.models.answers import Detection as Detection
    from convoy.models.answers import Detections as Detections
    from convoy.models.answers import Prediction as Prediction
    from convoy.models.answers import Segmentation as Segmentation
    from convoy.models.errors import ConvoyError as ConvoyError
    from convoy.models.errors import RequestError as RequestError

# Where core.symlinks is false, as on Windows, git writes a link as a text file.
if os.path.isfile(os.path.join(os.path.dirname(__file__), "app")):  # noqa: PTH113, PTH118, PTH120 - pathlib is slow to import
    raise ImportError(
        "this checkout of Convoy has no symbolic links; run `git config core.symlinks true` and "
        "`git checkout -- convoy` in it, or install a release with `pip install convoy-serve`"
    )

_PLACES = {
    "AsyncClient": "convoy.app.client.client:AsyncClient",
    "Box": "convoy.models.answers:Box",
    "Classification": "convoy.models.answers:Classification",
    "Client": "convoy.app.client.client:Client",
    "ClassShare": "convoy.models.answers:ClassShare",
    "ConvoyError": "convoy.models.errors:ConvoyError",
    "Detection": "convoy.models.answers:Detection",
    "Detections": "convoy.models.answers:Detections",
    "Engine": "convoy.app.python.engine:PythonEngine",
    "ExportResult": "convoy.export.python:ExportResult",
    "ModelSummary": "convoy.app.python.records:ModelSummary",
    "Prediction": "convoy.models.answers:Prediction",
    "RemoteModel": "convoy.app.client.records:RemoteModel",
    "RequestError": "convoy.models.errors:RequestError",
    "Segmentation": "convoy.models.answers:Segmentation",
}
__all__ = [
    "AsyncClient",
    "Box",
    "ClassShare",
    "Classification",
    "Client",
    "ConvoyError",
    "Detection",
    "Detections",
    "Engine",
    "ExportResult",
    "ModelSummary",
    "Prediction",
    "RemoteModel",
    "RequestError",
    "Segmentation",
    "export",
]


def __getattr__(name: str) -> Any:
    if name == "export":
        return import_module("convoy.export")  # a module that can be called
    if name not in _PLACES:
        raise AttributeError(f"module 'convoy' has no attribute {name!r}")
    module, _, attribute = _PLACES[name].partition(":")
    found = globals()[name] = getattr(import_module(module), attribute)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
