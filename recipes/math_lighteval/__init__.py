"""Pai-Megatron-Patch's DeepSeek-V3 recipe: GRPO on MATH-lighteval."""
