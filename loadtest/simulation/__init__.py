"""The scheduler's own policy, and others, in virtual time.

Knows arrivals, devices that take a known time, and rules to decide by. Knows no server, no clock and no engine.
"""
