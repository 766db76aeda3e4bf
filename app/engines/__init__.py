"""Engines: one contract, one file per runtime, and one table to choose from."""

import os

# Stops ONNX Runtime from leaving a device id in the user's cache folder and from sending telemetry.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
