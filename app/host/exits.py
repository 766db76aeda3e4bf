"""What the exit codes of `convoy serve` mean, beside 0 (drained after a signal) and 2 (called wrongly)."""

NOTHING_TO_SERVE = 1
ENGINE_LOST = 70  # it hung and could not be replaced; only a new process helps
