"""Says what this machine has for a run, what is wrong with it, and what to do about each."""
