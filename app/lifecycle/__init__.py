"""From a store to running engines and back: versions, loads, lanes, health, upgrades.

Knows stores, engines and the scheduler. Knows no protocols and no processes.
"""
