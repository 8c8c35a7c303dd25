"""Programs that a benchmark starts with the interpreter of an engine's environment; see ``tools/bench/remote.py``."""
