"""Ten networks that are hard in INT8: trained, exported, and as a table; a development program, not installed."""
