"""The slice of Megatron-LM; without this file the folder would give way to any other package of its name."""
