"""The Open Inference Protocol: tensors, outputs and documents, independent of HTTP and gRPC."""
