"""The sources of a step's samples: generated for the step, by rollout ranks beside training, or saved earlier."""
