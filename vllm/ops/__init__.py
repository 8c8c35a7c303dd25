"""The device ops of the rollout engine: contract and plain-torch reference."""
