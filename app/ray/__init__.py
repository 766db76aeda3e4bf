"""A core in a replica of Ray Serve: configuration, routing, health and autoscaling.

Installs no signal handlers, ends no process and opens no port; Ray does all of that.
"""
