"""Rollout by the vLLM engine in the worker's own process."""
