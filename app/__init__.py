"""The server: from a bundle to answers over HTTP, gRPC, Ray and Python."""
