"""The Open Inference Protocol: tensors, outputs and documents. Knows no wire, its headers or its encoding."""
