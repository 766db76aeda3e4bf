"""`python -m loadtest.generator` is one generator process; `loadtest.processes` starts it."""

from loadtest.generator.run import main

main()
