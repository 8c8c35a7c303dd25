"""Hugging Face's on-disk formats, read in one place for both engines; imports nothing else of this repository."""
