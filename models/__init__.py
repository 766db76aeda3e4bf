"""What a model is: its specification, its files on disk, its images, and the CNNs that ship with Convoy."""
