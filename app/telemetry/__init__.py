"""What happened, counted and timed, and what a GPU says of itself.

Knows requests, batches and lanes; decides nothing, and
no request waits for it.
"""
