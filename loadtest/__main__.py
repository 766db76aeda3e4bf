"""`python -m loadtest` is `convoy loadtest`, and reaches every other subcommand by its name."""

from convoy.command import main

main(default="loadtest")
