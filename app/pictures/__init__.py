"""From an image to a sample, and from a model's outputs to classes, boxes and class maps."""
