"""The scheduler and what it hands to the model runner."""
