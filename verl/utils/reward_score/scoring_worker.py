"""One scoring process: JSON lines in on stdin, JSON lines out, nothing else; killed from outside when it hangs."""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import signal
import stat
import sys
from typing import Any, TextIO

from verl.utils.import_utils import load_extern_type

_PR_SET_PDEATHSIG = 1
_MAX_ADDRESS_SPACE = 16 << 30  # an answer that asks for more memory than this gets a MemoryError, not the machine
_MAX_PRINTED = 64 << 20  # what the function prints lands in a temporary file; beyond this the process is ended


def main() -> None:
    """Arguments: path of the reward function's file, its name, its keyword arguments as JSON."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_ADDRESS_SPACE, _MAX_ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_PRINTED, _MAX_PRINTED))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = _claim_stdout()
    path, name, kwargs = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    function = load_extern_type(path, name)
    _send(replies, {"ready": True})
    for line in sys.stdin:
        _send(replies, _score(function, json.loads(line), kwargs))
        _drop_printed()


def _claim_stdout() -> TextIO:
    """The reply stream; whatever the reward function prints goes to stderr instead."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _score(function: Any, job: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        result = function(job["data_source"], job["solution_str"], job["ground_truth"], job["extra_info"], **kwargs)
        parts = result if isinstance(result, dict) else {"score": result}
        numbers = {str(key): float(value) for key, value in parts.items()}
        sys.stdout.flush()  # printing beyond the limit is this answer's failure, not the next one's
        if "score" not in numbers:
            raise ValueError(f"the reward function returned {sorted(numbers)}, which has no 'score'")
        wrong = [name for name, number in numbers.items() if not math.isfinite(number)]
        if wrong:  # one NaN would make every advantage of its batch NaN
            raise ValueError(f"the reward function returned numbers that are not finite: {wrong}")
        return {"parts": numbers}
    except Exception as error:  # a process edge: any failure of the user's function is this sample's, reported by name
        return {"error": f"{type(error).__name__}: {str(error)[:500]}"}


def _drop_printed() -> None:
    """Empties the file behind stdout and stderr, so that the limit is per answer and the disk does not fill."""
    if stat.S_ISREG(os.fstat(2).st_mode):
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)


def _send(stream: TextIO, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
