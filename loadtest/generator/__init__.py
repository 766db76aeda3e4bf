"""The generator process, which sends the requests of its job and records how they end.

It imports neither numpy nor modules of the parent, so that it starts in a tenth of a second.
"""
