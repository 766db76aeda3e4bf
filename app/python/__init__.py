"""The core in a program of the user's: a notebook, a test, a host of its own. No port, no signal, no exit.

Above every other room of the server, whose calls, decoder and words it uses; nothing of the server imports it.
"""
