"""Several processes as one server: edges that speak to clients, one core that runs the engines, a supervisor.

supervisor   holds the port and the shared memory, starts the others, replaces those that die
edge         accepts, parses, decodes, encodes; imports no engine
core         engines, queues, metrics, gRPC, and every route that does not infer
"""
