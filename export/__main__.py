"""`python -m export` is `convoy export`, and reaches every other subcommand by its name."""

from convoy.command import main

main(default="export")
