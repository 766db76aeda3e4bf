"""The server process: sockets, TLS, signals, uvicorn, the gRPC listener's lifetime, exit codes, logs, threads.

Apart from `main`, which assembles a server, it knows nothing about models.
"""
