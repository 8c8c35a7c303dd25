"""For agent loops of users."""
