"""The other side of the wire: how fast a server answers, measured as its clients would feel it.

It knows HTTP and the Open Inference Protocol. It knows nothing of Convoy's inside, so any server that
speaks the protocol can be the target.
"""
