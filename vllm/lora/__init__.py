"""Names of vLLM's adapters, which this engine does not have."""
