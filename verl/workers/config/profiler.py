"""Config of profiling: which tool and steps, and which ranks of a role."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl.workers.config.keys import Idle, Section, Values, key, names_of, one_of

TOOLS = ("torch", "npu")
NO_PROFILER = Idle("no profiler is enabled for a step of global_profiler.steps", lambda run, own: not run.is_profiled)


@dataclass(frozen=True)
class NPUToolConfig(Section):
    """What ``torch_npu.profiler`` records."""

    #: detail of the device's data: ``level_none``, ``level0``, ``level1`` or ``level2``.
    level: str = key("level1", one_of("level_none", "level0", "level1", "level2"))
    #: of ``npu`` and ``cpu`` activities, ``memory``, ``shapes``, ``module`` and ``stack``; empty means both activities.
    contents: list[str] = key(list, names_of("npu", "cpu", "memory", "shapes", "module", "stack"))
    #: make the trace when a recording stops; False leaves that to ``torch_npu.profiler.profiler.analyse``.
    analysis: bool = True


@dataclass(frozen=True)
class ToolConfig(Section):
    """Settings of each tool."""

    npu: NPUToolConfig = key(NPUToolConfig)


@dataclass(frozen=True)
class ProfilerConfig(Section):
    """Which ranks of a role record the steps of ``global_profiler.steps`` (upstream: ``ProfilerConfig``)."""

    enable: bool = False  #: record this role's processes.
    all_ranks: bool = False  #: record all of them.
    #: record these ranks; empty means rank 0.
    ranks: list[int] = key(list, Values("ranks are 0 or above", lambda value: all(rank >= 0 for rank in value)))
    tool: str | None = None  #: ``torch`` or ``npu``; absent means ``global_profiler.tool``.
    save_path: str | None = None  #: folder of the traces; absent means ``global_profiler.save_path``.
    tool_config: ToolConfig = key(ToolConfig)

    def takes(self, rank: int) -> bool:
        """Whether this rank of the role is recorded."""
        return self.enable and (self.all_ranks or rank in (self.ranks or [0]))


@dataclass(frozen=True)
class GlobalProfilerConfig(Section):
    """The steps that are recorded, and with what; a role's ``profiler.enable`` says who is."""

    tool: str | None = None  #: ``torch`` (``torch.profiler``, any device) or ``npu`` (``torch_npu.profiler``).
    steps: list[int] | None = None  #: the training steps; counted from 1.
    profile_continuous_steps: bool = False  #: one trace for steps that follow one another, in place of one each.
    save_path: str | None = None  #: folder of the traces; absent means ``profile`` in ``trainer.report_dir``.

    def starts_at(self, step: int) -> bool:
        """Whether a recording starts before ``step``."""
        steps = self.steps or []
        return step in steps and not (self.profile_continuous_steps and step - 1 in steps)

    def stops_after(self, step: int) -> bool:
        """Whether a recording stops after ``step``."""
        steps = self.steps or []
        return step in steps and not (self.profile_continuous_steps and step + 1 in steps)


def profiling_problems(config: GlobalProfilerConfig, roles: dict[str, ProfilerConfig], device: str) -> Iterator[str]:
    """What keeps an enabled profiler from recording, one sentence each; ``roles`` by their key."""
    for name, role in roles.items():
        if not role.enable or not config.steps:
            continue
        tool = role.tool or config.tool
        if tool not in TOOLS:
            yield (
                f"{name}.enable is True and the tool is {tool!r} (global_profiler.tool); expected "
                f"{' or '.join(TOOLS)}: nsys and torch_memory are not supported"
            )
        elif tool == "npu" and device not in ("npu", "auto"):
            yield f"global_profiler.tool is npu and trainer.device {device}; torch profiles a {device}"
