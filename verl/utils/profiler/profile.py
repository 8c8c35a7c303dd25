"""Records a worker process with ``torch.profiler`` or ``torch_npu.profiler`` between two calls of the controller.

Phases, ``prefill``, ``decode``, ``forward_backward``, ``micro_batch N forward`` and ``backward`` and ``optimizer_step``
are ranges in it. A process that is not chosen has no profiler at all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import torch

from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.import_utils import load_provider
from verl.workers.config.profiler import GlobalProfilerConfig, ProfilerConfig

_NPU = "mindspeed.profiler:NpuRecording"
FOLDER = "profile"


class _Recorder(Protocol):
    def start(self) -> None: ...
    def stop(self) -> None: ...


class DistProfiler:
    """The profiler of one rank; does nothing on a rank that is not chosen (upstream: ``DistProfiler``).

    Args:
        rank: of the process in its worker group.
        role: the name of the group, for the names of files.
        device_type: cpu, cuda or npu.
        report_dir: where traces go, in ``profile``, unless a ``save_path`` is given.
    """

    def __init__(
        self,
        rank: int,
        config: ProfilerConfig,
        general: GlobalProfilerConfig,
        role: str,
        device_type: str,
        report_dir: str,
    ) -> None:
        self.rank, self.config, self.role, self.device_type = rank, config, role, device_type
        self.tool = config.tool or general.tool
        self.directory = Path(config.save_path or general.save_path or Path(report_dir) / FOLDER).expanduser()
        self._running: tuple[_Recorder, Path] | None = None

    def start(self, name: str) -> None:
        """Start a recording called ``name``, as ``step_3``; ends one that is still running."""
        if not self.config.takes(self.rank):
            return
        self.stop()
        folder = self.directory / name
        folder.mkdir(parents=True, exist_ok=True)
        recorder = self._npu(folder) if self.tool == "npu" else _torch(self.device_type)
        recorder.start()
        self._running = recorder, folder

    def stop(self) -> str | None:
        """End the recording and write it; the path of the trace, or of the folder that torch_npu writes into."""
        if self._running is None:
            return None
        (recorder, folder), self._running = self._running, None
        recorder.stop()
        if not isinstance(recorder, torch.profiler.profile):
            return str(folder)
        final = folder / f"{self._name}.json.gz"
        partial = folder / f".{self._name}.{os.getpid()}.json.gz"  # torch compresses by the ending
        recorder.export_chrome_trace(str(partial))
        os.replace(partial, final)
        return str(final)

    @property
    def _name(self) -> str:
        return f"{self.role}_rank_{self.rank}"

    def _npu(self, folder: Path) -> _Recorder:
        chosen = self.config.tool_config.npu
        recorder: _Recorder = load_provider(_NPU)(
            str(folder), self._name, level=chosen.level, contents=tuple(chosen.contents), analysis=chosen.analysis
        )
        return recorder


class DistProfilerExtension:
    """The calls of a worker group that start and stop the profilers of its ranks (upstream: the same name)."""

    profiler: DistProfiler

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, name: str) -> None:
        self.profiler.start(name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> str | None:
        return self.profiler.stop()


def _torch(device_type: str) -> torch.profiler.profile:
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "6"
    )  # else its start and stop are lines on stderr, in some builds of torch
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device_type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities)
