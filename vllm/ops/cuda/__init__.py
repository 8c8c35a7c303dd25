"""The op table of NVIDIA devices, in Triton and torch's own ops."""
