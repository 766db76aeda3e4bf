"""`python -m convoy` is the `convoy` command."""

from convoy.command import main

main()
