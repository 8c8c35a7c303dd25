"""Operator commands; each is `python -m tools.NAME --help`."""
