"""Profiling of worker processes, timers and memory lines (upstream: ``verl.utils.profiler``)."""

from verl.utils.profiler.performance import (
    GPUMemoryLogger,
    log_gpu_memory_usage,
    mark_annotate,
    mark_end_range,
    mark_start_range,
    marked_timer,
    simple_timer,
)
from verl.utils.profiler.profile import DistProfiler, DistProfilerExtension
from verl.workers.config.profiler import ProfilerConfig

__all__ = [
    "DistProfiler",
    "DistProfilerExtension",
    "GPUMemoryLogger",
    "ProfilerConfig",
    "log_gpu_memory_usage",
    "mark_annotate",
    "mark_end_range",
    "mark_start_range",
    "marked_timer",
    "simple_timer",
]
