"""The engine core: scheduling, execution, sampling."""
