"""`convoy-client` on the package index: this client alone, built from the same files. Needs a checkout."""
