"""The command `vllm`."""
