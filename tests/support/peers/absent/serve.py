"""A peer whose Python no machine has, so that it is never started."""
