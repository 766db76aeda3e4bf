"""Clients of a server: `convoy.Client`, `convoy.AsyncClient`, and the client of `convoy predict`.

The server imports nothing from here. It shares only records and errors with the server.
"""
