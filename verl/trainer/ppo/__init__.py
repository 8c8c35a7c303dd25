"""PPO-style training: the loop, its algorithms, checkpoints and metrics."""
