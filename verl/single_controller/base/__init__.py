"""The call contract between the controller and its workers, without a launcher."""

from verl.single_controller.base.worker import Worker
from verl.single_controller.base.worker_group import (
    WorkerDiedError,
    WorkerError,
    WorkerGroup,
    WorkerTimeoutError,
    get_together,
)

__all__ = ["Worker", "WorkerDiedError", "WorkerError", "WorkerGroup", "WorkerTimeoutError", "get_together"]
