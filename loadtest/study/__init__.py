"""The scheduler's own policy against others in all scenarios, as a page: `python -m convoy.loadtest.study`.

Knows scenarios, figures and the page; `convoy.loadtest.simulation` runs each. A development program: it is in no wheel.
"""
