"""How a worker generates responses."""
