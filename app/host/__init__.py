"""A process of the operating system that serves something: sockets, signals, exit codes, logs, threads.

Knows nothing of models, requests or protocols: what is served comes in from above.
"""
