"""What proves and measures the product, for those who work on it; each is `python -m tools.workshop.NAME --help`."""
