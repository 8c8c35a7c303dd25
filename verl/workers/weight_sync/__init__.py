"""The way of the weights from training to rollout, and the switch of a worker between the two."""
