"""From ONNX to a TensorRT plan. Needs tensorrt, cuda-python, numpy and `models`; nothing else may be imported
here, because the server's image starts `python -m convoy.export.to_tensorrt` without torch, onnx or a terminal."""
