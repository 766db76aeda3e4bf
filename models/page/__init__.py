"""Self-contained HTML pages and SVG charts.

It is part of `models` because export, the load tester and the campaign share it, and `models` is below all of them. It
imports nothing of ours.
"""
