"""The RL system: one controller, one worker process per device."""
