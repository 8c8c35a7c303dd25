"""Rollouts of several turns: environments, tools, and conversations as token ids."""
