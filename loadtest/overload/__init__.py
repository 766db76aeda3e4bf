"""What becomes of pictures when more come than can be answered, and of a small one beside large ones."""
