"""Examines this machine for a run: what it has, what is wrong, and what to do about it."""
