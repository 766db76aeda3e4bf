"""Clients of a server: `convoy.Client`, `convoy.AsyncClient`, and the client of `convoy predict`.

The server imports nothing of it. It shares the server's records and errors, and nothing else.
"""
