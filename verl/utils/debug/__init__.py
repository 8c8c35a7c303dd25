"""Upstream's older path of the timers and memory figures of ``verl.utils.profiler``."""

from verl.utils.profiler.performance import GPUMemoryLogger, log_gpu_memory_usage, marked_timer, simple_timer

__all__ = ["GPUMemoryLogger", "log_gpu_memory_usage", "marked_timer", "simple_timer"]
