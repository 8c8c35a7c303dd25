"""One scoring process: JSON lines in on stdin, JSON lines out, nothing else; killed from outside when it hangs."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import resource
import signal
import stat
import sys
import time
from collections.abc import Sequence
from typing import Any

from hf_formats.parent_death import end_with_parent
from verl.utils.child_process import claim_stdout, send
from verl.utils.reward_score.event_loop import awaited
from verl.utils.reward_score.functions import RewardFunction, RewardFunctionSpec, gather, load_reward_function

_MAX_PRINTED = 64 << 20  # what the function prints lands in a temporary file; beyond this the process is ended
_MAX_PARSE_CHARS = 2000


def main() -> None:
    """Arguments: functions as a JSON list of {path, name, kwargs}; seconds of one async sample; MiB of memory, 0 any;
    the parent's pid.

    An answer that asks for more memory gets a MemoryError, not the machine.
    """
    end_with_parent(int(sys.argv[4]), signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if memory_bytes := int(sys.argv[3]) << 20:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_PRINTED, _MAX_PRINTED))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = claim_stdout()
    functions = [load_reward_function(RewardFunctionSpec(**spec)) for spec in json.loads(sys.argv[1])]
    kinds = [{"is_batched": f.is_batched, "is_async": f.is_async, "version": f.version} for f in functions]
    send(replies, {"ready": kinds})
    # One loop for the life of the process: locks, queues and clients of a function's module belong to their loop. It
    # runs in this thread, where a function may set alarms, and only while a call runs.
    with asyncio.Runner() as runner:
        for line in sys.stdin:
            request = json.loads(line)
            reply = _score(runner, functions[request["function"]], request["samples"], float(sys.argv[2]))
            send(replies, {**reply, "tasks_left": len(asyncio.all_tasks(runner.get_loop()))})
            _drop_printed()


def _score(
    runner: asyncio.Runner, function: RewardFunction, samples: list[list[Any]], timeout_s: float
) -> dict[str, Any]:
    """``{"results": [one for each sample], "seconds": of the call}``; ``error`` instead when the whole call failed."""
    start = time.perf_counter()
    try:
        results = _results(runner, function, samples, timeout_s)
        sys.stdout.flush()  # printing beyond the limit is this answer's failure, not the next one's
    except Exception as error:  # a process edge: any failure of the user's function is this call's, reported by name
        return {"error": _text(error), "seconds": time.perf_counter() - start}
    return {"results": [sample_result(result, timeout_s) for result in results], "seconds": time.perf_counter() - start}


def _results(
    runner: asyncio.Runner, function: RewardFunction, samples: list[list[Any]], timeout_s: float
) -> Sequence[Any]:
    if not function.is_batched:
        is_async = function.is_async
        return runner.run(gather(function, samples, timeout_s)) if is_async else [_single(runner, function, samples)]
    results = _finished(runner, function.call(samples))
    if not isinstance(results, Sequence) and hasattr(results, "tolist"):
        results = results.tolist()  # an array or a tensor of scores
    if not isinstance(results, Sequence) or len(results) != len(samples):
        raise ValueError(f"a batched reward function returned {_size(results)} for {len(samples)} samples")
    return results


def _finished(runner: asyncio.Runner, result: Any) -> Any:
    """What a call returned; also a function that is not known as async may return something to wait for."""
    return runner.run(awaited(result)) if inspect.isawaitable(result) else result


def _single(runner: asyncio.Runner, function: RewardFunction, samples: list[list[Any]]) -> Any:
    try:
        return _finished(runner, function.call(samples))
    except Exception as error:  # as in _score: this sample's
        return error


def sample_result(result: Any, timeout_s: float | None = None) -> dict[str, Any]:
    """One sample's numbers, and the text beside them as ``parse``; ``error`` or ``timeout`` when it has none."""
    if isinstance(result, TimeoutError):
        return {"timeout": str(result) or ("TimeoutError" if timeout_s is None else f"took more than {timeout_s:g} s")}
    try:
        if isinstance(result, BaseException):
            raise result
        parts = result if isinstance(result, dict) else {"score": result}
        texts = {str(name): value for name, value in parts.items() if name != "score" and _is_text(value)}
        numbers = {str(name): float(value) for name, value in parts.items() if name not in texts}
        if "score" not in numbers:
            raise ValueError(f"the reward function returned {sorted(numbers)}, which has no 'score'")
        wrong = [name for name, number in numbers.items() if not math.isfinite(number)]
        if wrong:  # one NaN would make every advantage of its batch NaN
            raise ValueError(f"the reward function returned numbers that are not finite: {wrong}")
        return {"parts": numbers, "parse": {name: _shortened(value) for name, value in texts.items()}}
    except (Exception, SystemExit) as error:  # as above, of one sample
        return {"error": _text(error)}


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, (str, list, tuple, dict))


def _shortened(value: Any) -> str | None:
    return None if value is None else str(value)[:_MAX_PARSE_CHARS]


def _size(results: Any) -> str:
    return f"{len(results)} results" if isinstance(results, Sequence) else type(results).__name__


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"


def _drop_printed() -> None:
    """Empties the file behind stdout and stderr, so that the limit is per answer and the disk does not fill."""
    if stat.S_ISREG(os.fstat(2).st_mode):
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)


if __name__ == "__main__":
    main()
