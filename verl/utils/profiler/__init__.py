"""Profiling of worker processes."""

from verl.utils.profiler.performance import simple_timer
from verl.utils.profiler.profile import DistProfiler, DistProfilerExtension

__all__ = ["DistProfiler", "DistProfilerExtension", "simple_timer"]
