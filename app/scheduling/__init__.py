"""Decide which requests run when. Nothing here knows about HTTP, gRPC or images."""
