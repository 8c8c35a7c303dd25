"""Work on a second stream of a device, beside what follows it on the current one.

Events order the two: the second stream waits for everything before, and the current one waits for the second when the
result is asked for. So it works inside a capture too, where these events make branches of the graph; such a graph takes
more of the device's streams. The second stream's memory is used again by that stream only, and only after it has waited
for the current one, which by then has read every earlier result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class SecondStream:
    """See ``RolloutOps.run_beside``. Holds one stream of each device, made when it is first used."""

    def __init__(self) -> None:
        self._streams: dict[int, Any] = {}

    def __call__(self, work: Callable[[], Any]) -> Callable[[], Any]:
        import torch_npu

        current = torch_npu.npu.current_stream()
        second = self._streams.get(current.device_index)
        if second is None:
            second = self._streams[current.device_index] = torch_npu.npu.Stream()
        second.wait_stream(current)
        with torch_npu.npu.stream(second):
            result = work()

        def join() -> Any:
            current.wait_stream(second)
            return result

        return join
