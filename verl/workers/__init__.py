"""What runs on the devices: actor, reference, rollout; and the reward managers."""
