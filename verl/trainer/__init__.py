"""The driver: command, config, training loop."""
