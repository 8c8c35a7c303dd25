"""One rank's device state: weights, KV cache, model execution."""
