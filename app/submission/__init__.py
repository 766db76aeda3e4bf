"""Between the wires and the core: registered shared memory, and refusals in words. Knows no wire and no engine."""
