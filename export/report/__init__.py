"""The bundle's report: one page for people that needs nothing but itself."""
