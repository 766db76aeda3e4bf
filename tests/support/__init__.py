"""What the tests stand on: models, stores, servers as processes, and a wire without manners."""
