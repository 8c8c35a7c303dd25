"""Where a step's samples come from: generated for it, or by rollout ranks that run beside training."""
