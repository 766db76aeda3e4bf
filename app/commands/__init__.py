"""What is asked from a terminal and does not serve: what this machine has, what is in a store, what an image shows."""
