"""`python -m models` is `convoy train`, and reaches every other subcommand by its name."""

from convoy.command import main

main(default="train")
