"""From one version, a bundle or a bare model, to engines that have proved themselves.

Blocking work, done in threads. Knows no requests, and nothing of what serves meanwhile.
"""
