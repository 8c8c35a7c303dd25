"""Programs that ``tools/workshop/bench/remote.py`` starts with the interpreter of an engine's environment."""
