"""Scheduling and KV cache bookkeeping, without torch."""
