"""From one version, a bundle or a bare model, to proved engines.

Blocking work, done in threads. Knows no requests.
"""
