"""The bundle's report: one self-contained page for people."""
