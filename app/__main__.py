"""`python -m app` is `convoy serve`, and reaches every other subcommand by its name."""

from convoy.command import main

main(default="serve")
