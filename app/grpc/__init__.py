"""gRPC: the inference service, health and the protocol's extensions."""
