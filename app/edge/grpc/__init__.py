"""gRPC: the inference service, health, and the extensions. What tensors mean is `convoy.app.edge.oip`'s."""
