"""`python -m convoy.loadtest.generator` is one generator process; `convoy.loadtest.processes` starts it."""

from convoy.loadtest.generator.run import main

main()
