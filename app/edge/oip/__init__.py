"""The Open Inference Protocol's meaning: tensors, outputs, documents. Knows no wire, its headers or its encoding."""
