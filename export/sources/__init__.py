"""The source of a network: SOURCE, its weights and its options, as an ONNX graph with reference answers."""
