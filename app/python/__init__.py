"""The core inside a user's program: a notebook, a test, another host. No ports, no signals, no exit.

Uses the server's calls and decoder; nothing in the server imports it.
"""
