"""From a store to engines at work and back: which versions there are, which are wanted, loading them, their lanes, their
health, their upgrades.

Knows no wire.
"""
