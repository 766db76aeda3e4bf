"""What is asked of Convoy from a terminal but does not serve: what there is here, what is in a store, what an image shows."""
