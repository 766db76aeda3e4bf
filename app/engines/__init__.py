"""Engines: one contract, one file per way to run a model, one table to choose from."""
