"""From a trained CNN to a verified bundle: ONNX, variants, proof, latency, and the folder that serves.

Imports models and convoy.app.engines (what is measured is what is served) and nothing else of Convoy's. Torch is
imported by `torch_child` alone, in an interpreter of its own, and by `convoy.export(module)`, whose caller has it.
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
        """Export a torch module, or what SOURCE of `convoy export` may be; see `convoy.export.python.export`."""
        from convoy.export.python import export

        return export(model, **options)


# `convoy.export(...)` is the function, `convoy.export.command` and so on are the modules.
sys.modules[__name__].__class__ = _CallableModule
