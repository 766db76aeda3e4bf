"""From a trained CNN to a verified bundle: ONNX, variants, proof, latency, and the folder that serves.

Imports models and app.engines (what is measured is what is served) and nothing else of Convoy's. Torch is
imported by `torch_child` alone, in an interpreter of its own.
"""
