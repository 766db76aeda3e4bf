"""The process that serves: sockets, TLS, signals, uvicorn, the gRPC listener's life, exit codes, logs, threads.

Apart from `main`, which puts a server together, it knows nothing of models and cores.
"""
