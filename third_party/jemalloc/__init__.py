"""jemalloc's own statistics of this process, when it is the process's allocator."""

from third_party.jemalloc.stats import MemoryStats, find_library, is_loaded, memory_stats

__all__ = ["MemoryStats", "find_library", "is_loaded", "memory_stats"]
