"""Everything that the operator can set: options, environment, configuration file, and reload."""
