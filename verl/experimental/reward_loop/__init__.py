"""For plug-ins alone: upstream's names of reward managers that grade one sample at a time."""
