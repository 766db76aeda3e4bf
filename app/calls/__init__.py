"""The life of one call over any protocol: key, memory, deadline, cancellation and its record."""
