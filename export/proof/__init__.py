"""Is it still right? Outputs against the original, accuracy against the labels, and the gate."""
