"""Tensor and sequence parallelism: collectives with gradients, parallel layers, losses on sharded logits."""
