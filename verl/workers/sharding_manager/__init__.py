"""Moving a worker between training and rollout."""
