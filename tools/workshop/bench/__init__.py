"""Benchmarks: comparisons measured in one run, as ratios."""
