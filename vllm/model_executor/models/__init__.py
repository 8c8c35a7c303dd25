"""Models by architecture name."""
