"""Where a run's newest checkpoint is, and whether one is due (upstream: ``utils.checkpoint.checkpoint_manager``)."""

from __future__ import annotations

import logging
import os
import time

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
# The environment of platforms that take a machine back at a time, in seconds since 1970, that is known in advance.
_EXPIRATIONS = (
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)


def get_checkpoint_tracker_filename(root_path: str) -> str:
    """The file with the number of the newest checkpoint in ``root_path``."""
    return os.path.join(root_path, TRACKER)


def find_latest_ckpt_path(path: str | None, directory_format: str = "global_step_{}") -> str | None:
    """The newest checkpoint's folder in ``path``; None without a path, a tracker file or the folder it names."""
    if path is None:
        return None
    tracker = get_checkpoint_tracker_filename(path)
    if not os.path.isfile(tracker):
        return None
    with open(tracker, encoding="utf-8") as file:
        step = int(file.read())
    found = os.path.join(path, directory_format.format(step))
    if not os.path.exists(found):
        logger.warning("%s names step %d, but %s does not exist", tracker, step, found)
        return None
    return found


def should_save_ckpt_esi(max_steps_duration: float, save_ckpt_duration: float = 60, redundant_time: float = 0) -> bool:
    """Whether the machine is taken back before another step, a save and some spare time have passed.

    Args:
        max_steps_duration: seconds of the longest step so far; False before the first one (0).
        save_ckpt_duration: seconds of a save.
        redundant_time: spare seconds.
    """
    given = next((value for name in _EXPIRATIONS if (value := os.environ.get(name))), None)
    if given is None or max_steps_duration <= 0:
        return False
    try:
        remaining = float(given) - time.time()
    except ValueError:
        logger.warning("the time %r at which the machine is taken back is not a number of seconds", given)
        return False
    return 0 < remaining <= max_steps_duration + save_ckpt_duration + redundant_time
