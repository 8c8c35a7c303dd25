"""DeepSeek-R1-Zero: GRPO with rule rewards on a DeepSeek-V3 model, from a JSON file to a report."""
