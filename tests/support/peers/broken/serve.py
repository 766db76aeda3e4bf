"""A peer that finds its port taken."""

raise SystemExit("the port is in use by somebody else")
