"""Reads a launch script of verl, without running it, and says what it means here."""
