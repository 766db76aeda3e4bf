"""HTTP/1.1: connections, bodies and routes. What tensors mean is `convoy.app.edge.oip`'s."""
