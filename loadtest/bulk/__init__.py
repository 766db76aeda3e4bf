"""`convoy batch` beside bare ONNX Runtime and the same decoder, in pairs in turns. Not installed."""
