"""The policy of the scheduler in virtual time, with engines of known latency and without a server."""
