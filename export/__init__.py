"""From a trained CNN to a verified bundle: ONNX, variants, proof, latency, and the folder that serves.

Imports models and convoy.app.engines (what is measured is what is served) and nothing else of Convoy's. Torch is
imported by `torch_child` alone, in an interpreter of its own.
"""

import os

# As in `convoy.app.engines`: whichever is imported first imports ONNX Runtime first.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
