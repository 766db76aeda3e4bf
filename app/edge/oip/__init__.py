"""The Open Inference Protocol's meaning: tensors, outputs, documents. Knows no wire: neither JSON nor protobuf, no headers."""
