"""The load test: measures throughput and latency of a server as its clients see them.

It works over HTTP or gRPC with any server that speaks the Open Inference Protocol, and does not use Convoy's own code.
The exceptions are `simulation`, which uses the scheduler, and `peers`, which uses the engines.
"""
