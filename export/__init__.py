"""From a trained CNN to a verified bundle: ONNX, variants, proof, latency, and the folder that serves.

Imports models and convoy.app.engines (what is measured is what serves) and nothing else of Convoy's. Only `torch_child`
imports torch, in its own interpreter, and `convoy.export(module)`, whose caller has it.
"""

import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convoy.export.python import ExportResult

# As in `convoy.app.engines`: whichever is imported first imports ONNX Runtime first.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


class _CallableModule(ModuleType):
    def __call__(self, model: Any, **options: Any) -> "ExportResult":
        """Export a torch module, or any SOURCE of `convoy export`; see `convoy.export.python.export`."""
        from convoy.export.python import export

        return export(model, **options)


# `convoy.export(...)` is the function; `convoy.export.command` and so on are the modules.
sys.modules[__name__].__class__ = _CallableModule
