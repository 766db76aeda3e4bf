"""The scheduler's own policy against others, in virtual time: `python -m convoy.loadtest.simulation`.

Knows arrivals, devices that take a known time, and rules to decide by. Knows no server, no clock and no engine.
"""
