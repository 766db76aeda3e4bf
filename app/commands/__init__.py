"""The commands that do not serve: what this machine has, what is in a store, what an image shows."""
