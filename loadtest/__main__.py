"""`python -m loadtest` is `convoy loadtest`, and reaches every other subcommand by its name."""

from convoy import main

main(default="loadtest")
