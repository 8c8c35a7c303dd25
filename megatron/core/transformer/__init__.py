"""Transformer parts: configs, attention, MLPs, experts, layers and their stack."""
