"""A store that is not on this machine: what is in it, and how a version of it comes here whole. Knows no engine."""
