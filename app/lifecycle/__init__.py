"""From a store to engines at work and back: versions, what is wanted of them, loads, lanes, health, upgrades.

Knows stores, engines and the scheduler. Knows no wire, and nothing of processes.
"""
