"""Engines: one contract, one file per way to run a model, one table to choose from."""

import os

# Importing ONNX Runtime otherwise leaves a device id in the user's cache folder and may report to its maker.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
