"""A core in a replica of Ray Serve: what Ray is told, how requests reach it, and how it says whether it is well.

Installs no signals, ends no process and opens no port: all of that is Ray's here.
"""
