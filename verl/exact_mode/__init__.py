"""Exact mode: op tables with which rollout and training give the same bits, and the arithmetic that they share."""
