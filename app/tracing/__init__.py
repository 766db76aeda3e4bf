"""Spans: what became of one request, and of the batch that it was in, told to a collector by OpenTelemetry.

Only `sdk` knows the library, and is imported only where tracing is on.
"""
