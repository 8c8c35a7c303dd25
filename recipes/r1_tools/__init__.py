"""Tools where they pay: products and counts with a calculator and programs, sums in the head."""
