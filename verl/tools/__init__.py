"""Tools that a model may call during a rollout."""
