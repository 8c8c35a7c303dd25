"""Config of profiling: which tool and steps, and which ranks of a role."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from verl.workers.config.values import Section, Values, one_of

TOOLS = ("torch", "npu")
_CONTENTS = ("npu", "cpu", "memory", "shapes", "module", "stack")


@dataclass(frozen=True)
class NPUToolConfig(Section):
    """What ``torch_npu.profiler`` records.

    Attributes:
        level: detail of the device's data: ``level_none``, ``level0``, ``level1`` or ``level2``.
        contents: of ``npu`` and ``cpu`` activities, ``memory``, ``shapes``, ``module`` and ``stack``; empty means both
            activities.
        analysis: make the trace when a recording stops; False leaves that to ``torch_npu.profiler.profiler.analyse``.
    """

    VALUES: ClassVar = {
        "level": one_of("level_none", "level0", "level1", "level2"),
        "contents": Values(f"expected names of {', '.join(_CONTENTS)}", lambda value: set(value) <= set(_CONTENTS)),
    }

    level: str = "level1"
    contents: list[str] = field(default_factory=list)
    analysis: bool = True


@dataclass(frozen=True)
class ToolConfig(Section):
    """Settings of each tool."""

    npu: NPUToolConfig = field(default_factory=NPUToolConfig)


@dataclass(frozen=True)
class ProfilerConfig(Section):
    """Which ranks of a role record the steps of ``global_profiler.steps`` (upstream: ``ProfilerConfig``).

    Attributes:
        enable: record this role's processes.
        all_ranks: record all of them.
        ranks: record these ranks; empty means rank 0.
        tool: ``torch`` or ``npu``; absent means ``global_profiler.tool``.
        save_path: folder of the traces; absent means ``global_profiler.save_path``.
    """

    VALUES: ClassVar = {"ranks": Values("ranks are 0 or above", lambda value: all(rank >= 0 for rank in value))}

    enable: bool = False
    all_ranks: bool = False
    ranks: list[int] = field(default_factory=list)
    tool: str | None = None
    save_path: str | None = None
    tool_config: ToolConfig = field(default_factory=ToolConfig)

    def takes(self, rank: int) -> bool:
        """Whether this rank of the role is recorded."""
        return self.enable and (self.all_ranks or rank in (self.ranks or [0]))


@dataclass(frozen=True)
class GlobalProfilerConfig(Section):
    """The steps that are recorded, and with what; a role's ``profiler.enable`` says who is.

    Attributes:
        tool: ``torch`` (``torch.profiler``, any device) or ``npu`` (``torch_npu.profiler``).
        steps: the training steps; counted from 1.
        profile_continuous_steps: one trace for steps that follow one another, in place of one each.
        save_path: folder of the traces; absent means ``profile`` in ``trainer.report_dir``.
    """

    tool: str | None = None
    steps: list[int] | None = None
    profile_continuous_steps: bool = False
    save_path: str | None = None

    def starts_at(self, step: int) -> bool:
        """Whether a recording starts before ``step``."""
        steps = self.steps or []
        return step in steps and not (self.profile_continuous_steps and step - 1 in steps)

    def stops_after(self, step: int) -> bool:
        """Whether a recording stops after ``step``."""
        steps = self.steps or []
        return step in steps and not (self.profile_continuous_steps and step + 1 in steps)


def profiling_problems(config: GlobalProfilerConfig, roles: dict[str, ProfilerConfig], device: str) -> list[str]:
    """What keeps an enabled profiler from recording, one sentence each; ``roles`` by their key."""
    found = []
    for key, role in roles.items():
        if not role.enable:
            continue
        tool = role.tool or config.tool
        if tool not in TOOLS:
            found.append(
                f"{key}.enable is True and the tool is {tool!r} (global_profiler.tool); expected {' or '.join(TOOLS)}: "
                "nsys and torch_memory are not supported"
            )
        elif tool == "npu" and device not in ("npu", "auto"):
            found.append(f"global_profiler.tool is npu and trainer.device {device}; torch profiles a {device}")
        if not config.steps:
            found.append(f"{key}.enable is True and global_profiler.steps names no step; give it, as in [3]")
    return list(dict.fromkeys(found))
