"""Profiling of worker processes."""

from verl.utils.profiler.profile import DistProfiler, DistProfilerExtension

__all__ = ["DistProfiler", "DistProfilerExtension"]
