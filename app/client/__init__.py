"""Asks a server from a Python program: `convoy.Client`, `convoy.AsyncClient`, and what `convoy predict` uses.

The other side of the wire: nothing of the server imports it, and of the server it knows words and records alone.
"""
