"""One driver that calls methods on all workers."""
