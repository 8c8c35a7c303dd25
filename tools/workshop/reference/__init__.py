"""The reference of parameters, made from the typed config."""
