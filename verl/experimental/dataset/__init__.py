"""Orders of prompts that a user writes."""
