"""One process that sends: told what to send and when, it sends, notes, and draws no conclusions.

Imports no numpy and nothing that only the parent needs, so that it starts in a tenth of a second.
"""
