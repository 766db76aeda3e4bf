"""From ONNX to a TensorRT plan. Imports only tensorrt, cuda-python, numpy and `models`, because the server's image
starts `python -m convoy.export.to_tensorrt` without torch or onnx.
"""
