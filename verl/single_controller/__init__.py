"""One driver that calls methods on all workers."""

from verl.single_controller.base import Worker, WorkerGroup

__all__ = ["Worker", "WorkerGroup"]
