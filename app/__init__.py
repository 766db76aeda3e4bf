"""From a bundle to answers: engines, scheduling, the core, and its edges on the wire."""
