"""The quick start: GRPO on GSM8K with a Qwen or any other model, on whatever devices there are."""
