"""DeepSeek-V3 family models and their weights: configs, the weight plan, checkpoints and conversion commands."""
