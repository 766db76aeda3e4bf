"""Where a network comes from: SOURCE, its weights and its words, as an ONNX graph with answers to hold it against."""
