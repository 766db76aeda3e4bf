"""What happened, counted and timed, and what a GPU says of itself.

Knows requests, batches and lanes. Decides nothing, and no request waits for it.
"""
