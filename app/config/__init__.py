"""What the operator can set: options, environment, configuration file, and what a reload changes."""
