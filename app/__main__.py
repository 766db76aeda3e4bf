"""`python -m app` is `convoy serve`, and reaches every other subcommand by its name."""

from convoy import main

main(default="serve")
