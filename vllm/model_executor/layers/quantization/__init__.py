"""Weights held in fewer bits than the model's dtype."""
