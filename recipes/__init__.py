"""Training recipes: one folder each, with its launch script, configs, data preparation and reward."""
