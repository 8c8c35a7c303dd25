"""DAPO of Qwen3-30B-A3B, as verl's script for Ascend runs it."""
