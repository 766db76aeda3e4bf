"""A process that serves: sockets, signals, uvicorn, a gRPC listener's life, exit codes, logs, threads.

Knows nothing of models, edges and cores: what is served comes in as an argument.
"""
