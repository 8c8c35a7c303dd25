"""Profiling of worker processes (upstream: ``verl.utils.profiler``)."""

from verl.utils.profiler.performance import mark_annotate
from verl.utils.profiler.profile import DistProfiler, DistProfilerExtension
from verl.workers.config.profiler import ProfilerConfig

__all__ = ["DistProfiler", "DistProfilerExtension", "ProfilerConfig", "mark_annotate"]
