"""Models and their weights: configs, the weight plan, checkpoints and conversion commands."""
