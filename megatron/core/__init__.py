"""The training engine: the slice of megatron.core that the recipes use."""
