"""Convoy takes a trained CNN, optimises it for the device it will run on, proves that it is still right, and serves it.

Everything is imported as `convoy.app`, `convoy.export`, `convoy.models` and `convoy.loadtest`, so that a project may
have packages of those names beside this one. In a checkout these four are links to the folders at its top; in a wheel
they are ordinary folders.

The public names of Python are here, each imported when it is first used: `Engine`, what it gives, and what it raises.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convoy.app.edge.boxes import Detection as Detection
    from convoy.app.edge.class_map import ClassShare as ClassShare
    from convoy.app.edge.scores import Prediction as Prediction
    from convoy.app.python.engine import PythonEngine as Engine
    from convoy.app.python.records import Classification as Classification
    from convoy.app.python.records import Detections as Detections
    from convoy.app.python.records import ModelSummary as ModelSummary
    from convoy.app.python.records import Segmentation as Segmentation
    from convoy.models.errors import ConvoyError as ConvoyError
    from convoy.models.errors import RequestError as RequestError

# What a child process must have on its path to import Convoy from where this one did.
IMPORT_ROOT = Path(__file__).parent.parent
IS_CHECKOUT = Path(__file__).with_name("app").is_symlink()
_PLACES = {
    "Classification": "convoy.app.python.records:Classification",
    "ClassShare": "convoy.app.edge.class_map:ClassShare",
    "ConvoyError": "convoy.models.errors:ConvoyError",
    "Detection": "convoy.app.edge.boxes:Detection",
    "Detections": "convoy.app.python.records:Detections",
    "Engine": "convoy.app.python.engine:PythonEngine",
    "ModelSummary": "convoy.app.python.records:ModelSummary",
    "Prediction": "convoy.app.edge.scores:Prediction",
    "RequestError": "convoy.models.errors:RequestError",
    "Segmentation": "convoy.app.python.records:Segmentation",
}
__all__ = [
    "ClassShare",
    "Classification",
    "ConvoyError",
    "Detection",
    "Detections",
    "Engine",
    "ModelSummary",
    "Prediction",
    "RequestError",
    "Segmentation",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'convoy' has no attribute {name!r}")
    module, _, attribute = _PLACES[name].partition(":")
    found = globals()[name] = getattr(import_module(module), attribute)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
