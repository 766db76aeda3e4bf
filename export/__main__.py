"""`python -m export` is `convoy export`, and reaches every other subcommand by its name."""

from convoy import main

main(default="export")
