"""Memory features of the training engine on Ascend."""
