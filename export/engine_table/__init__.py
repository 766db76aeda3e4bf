"""The engines of the CPU beside each other, on networks of torchvision; a development program, not installed."""
