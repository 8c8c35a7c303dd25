"""DeepSeek-R1 with dynamic sampling, as in slime's example on 128 GPUs."""
