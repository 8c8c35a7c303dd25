"""Names of vLLM's transfer of weights to a server, which this engine does not have."""
