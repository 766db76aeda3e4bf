"""The other side of the wire: how fast a server answers, measured as its clients would feel it.

What measures knows HTTP and the Open Inference Protocol and nothing of Convoy's inside, so any server that speaks the
protocol can be the target. Two rooms use the server's own parts: `simulation` its scheduler, `peers` its engines.
"""
