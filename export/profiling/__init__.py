"""How fast each variant is, and how fast it could be on this device."""
