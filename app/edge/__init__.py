"""The edges: bytes on the wire to requests, answers to bytes. One meaning, whatever the wire."""
