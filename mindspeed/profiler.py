"""A recording of one process with ``torch_npu.profiler``: ops of the host and of the die, and named ranges.

Source: torch_npu's documentation of Ascend PyTorch Profiler. ``python -m mindspeed.profiler DIR`` makes the traces of
recordings in DIR.
"""

from __future__ import annotations

import logging
import subprocess
import sys

import torch_npu

logger = logging.getLogger(__name__)

_LEVELS = {"level_none": "Level_none", "level0": "Level0", "level1": "Level1", "level2": "Level2"}


class NpuRecording:
    """One recording, written to ``directory/{name}_{time}_ascend_pt``.

    Args:
        level: detail of the die's data.
        contents: of npu, cpu (activities; both if neither is there), memory, shapes, module, stack.
        analysis: make ``ASCEND_PROFILER_OUTPUT/trace_view.json`` in ``stop``, in a process of its own: the analysis
            changes how its process starts others, and refuses to run in a daemon.
    """

    def __init__(self, directory: str, name: str, *, level: str, contents: tuple[str, ...], analysis: bool) -> None:
        kinds = {kind: getattr(torch_npu.profiler.ProfilerActivity, kind.upper()) for kind in ("cpu", "npu")}
        chosen_level = getattr(torch_npu.profiler.ProfilerLevel, _LEVELS[level])
        self._directory, self._analysis = directory, analysis
        self._recording = torch_npu.profiler.profile(
            activities=[kinds[kind] for kind in ("cpu", "npu") if kind in contents] or list(kinds.values()),
            record_shapes="shapes" in contents,
            profile_memory="memory" in contents,
            with_stack="stack" in contents,
            with_modules="module" in contents,
            on_trace_ready=torch_npu.profiler.tensorboard_trace_handler(directory, name, analyse_flag=False),
            experimental_config=torch_npu.profiler._ExperimentalConfig(profiler_level=chosen_level),
        )

    def start(self) -> None:
        self._recording.start()

    def stop(self) -> None:
        self._recording.stop()
        if self._analysis:
            command = [sys.executable, "-m", "mindspeed.profiler", self._directory]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                logger.error("%s failed, run it by hand:\n%s", " ".join(command), done.stderr[-2000:])


if __name__ == "__main__":
    from torch_npu.profiler.profiler import analyse

    analyse(sys.argv[1])
