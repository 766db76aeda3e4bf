"""Counts and times of everything that happened, and GPU readings.

Knows requests, batches and lanes. Decides nothing, and no request waits for it.
"""
