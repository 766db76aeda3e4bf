"""`python -m loadtest` is `convoy loadtest`. It accepts the names of the other subcommands, too."""

from convoy.command import main

main(default="loadtest")
