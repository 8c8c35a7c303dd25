"""What a process is doing right now, as plain text, and the report that combines the answers of all ranks."""

from __future__ import annotations

import linecache
import os
import re
import socket
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from hf_formats.ranges import runs_text

_C10D = os.path.join("torch", "distributed", "distributed_c10d.py")
_DEVICE_READ = re.compile(r"\.(item|tolist|cpu|numpy|synchronize)\(")
_STDLIB = re.escape(sysconfig.get_path("stdlib") + os.sep)
_LIBRARY = re.compile(rf"{os.sep}torch{os.sep}|^<frozen |^{_STDLIB}(?!(site|dist)-packages)")
_TENSOR_NAMES = ("tensor", "output_tensor", "output", "tensor_list", "input_tensor", "input", "obj", "object_list")


@dataclass(frozen=True)
class Answer:
    """The state of one rank when the alarm was raised.

    Attributes:
        phase: the phase that the rank was in, "" for none.
        stuck_s: seconds for which nothing has moved.
        waits_for: the collective or transfer that the rank waits for, "" when it waits for none.
        at: the source line that is being executed; inside the standard library or torch, the line that called it.
        collectives: group -> the number of collectives that the rank has launched there.
        stacks: thread -> its Python stack.
        metrics: the latest metrics that were stored.
    """

    rank: int
    host: str
    pid: int
    phase: str
    stuck_s: float
    waits_for: str
    at: str
    collectives: dict[str, int]
    stacks: dict[str, str]
    metrics: dict[str, float]


def own_answer(
    rank: int,
    phase: str,
    stuck_s: float,
    thread_id: int | None,
    groups: Iterable[dist.ProcessGroup],
    metrics: Mapping[str, float],
) -> Answer:
    """Return the answer of this process; ``thread_id`` is the thread in the phase (None: the main thread)."""
    # The threads run on while this one reads source files; a frame that has returned by then has lost its callers.
    calls = {ident: list(traceback.walk_stack(frame)) for ident, frame in sys._current_frames().items()}
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    phase_ident = thread_id or threading.main_thread().ident
    in_phase = [frame for frame, _ in calls.get(phase_ident or 0, ())]
    return Answer(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        phase=phase,
        stuck_s=round(stuck_s, 1),
        waits_for=waits_for(in_phase) if in_phase else "",
        at=_line_of(_outside_libraries(in_phase)) if in_phase else "",
        collectives={describe_group(group): count for group, count in launched(groups)},
        stacks={
            f"{names.get(ident, 'not a Python thread')}{' (in the phase)' if ident == phase_ident else ''}": "".join(
                traceback.StackSummary.extract(reversed(stack)).format()
            )
            for ident, stack in calls.items()
            if ident != threading.get_ident()
        },
        metrics=dict(metrics),
    )


def waits_for(frames: Sequence[FrameType]) -> str:
    """Return the collective or transfer that a thread with ``frames``, innermost first, waits for, "" for none.

    It is recognised by a function of torch.distributed, by an object with a text ``waits_for``
    (``p2p_communication.Receiving``), or by a line that calls ``wait`` on a work or reads from a device, because a
    device's collectives end in its queue.
    """
    innermost, found = frames[0], ""
    for at in frames:
        if at.f_code.co_filename.endswith(_C10D):
            found = _describe_collective(at)  # the outermost call: all_gather_object rather than its all_gather
        elif not found:
            text = getattr(at.f_locals.get("self"), "waits_for", None)
            if isinstance(text, str):
                return text
    line = linecache.getline(innermost.f_code.co_filename, innermost.f_lineno)
    if not found and ".wait()" in line:
        return "work that was started before"
    if not found and _DEVICE_READ.search(line):
        return "the device, in whose queue a collective may wait"
    return found


def launched(groups: Iterable[dist.ProcessGroup]) -> list[tuple[dist.ProcessGroup, int]]:
    """Return how many collectives this rank has launched in each group whose backend counts them."""
    counts = []
    for group in groups:
        # torch has no public name for it, but its own reports of desynchronised ranks use it.
        count = getattr(group, "_get_sequence_number_for_group", None)
        try:
            counts += [(group, int(count()))] if count is not None else []
        except RuntimeError:
            continue  # this backend does not count
    return counts


def describe_group(group: dist.ProcessGroup | None) -> str:
    """Return the name and members of a group, such as ``tp [2, 3]``."""
    group = dist.group.WORLD if group is None else group
    if group is None:
        return "no group"
    name = "world" if group is dist.group.WORLD else getattr(group, "group_desc", "") or "group"
    return f"{name} [{runs_text(dist.get_process_group_ranks(group))}]"


def report(
    answers: Sequence[Answer], world_size: int, last_seen: Mapping[int, str], raised_by: int, config: str, now: str
) -> str:
    """Return the report, most useful lines first; ``last_seen`` describes ranks, including those without an answer."""
    by_rank = {answer.rank: answer for answer in answers}
    raiser = by_rank[raised_by]
    missing = [rank for rank in range(world_size) if rank not in by_rank]
    waiting = [answer for answer in answers if answer.waits_for]
    free = [answer for answer in answers if not answer.waits_for]
    lines = [
        f"{now}: phase {raiser.phase!r} hangs: nothing has moved on rank {raised_by} for {raiser.stuck_s:g} s "
        f"({len(answers)} of {world_size} ranks answered)",
        "",
        "Ranks that wait for others:",
        *_grouped((f"{a.waits_for}, at {a.at} (phase {a.phase or 'none'})", a.rank) for a in waiting),
        "Ranks that do not, the likely culprits:",
        *_grouped((f"at {a.at} (phase {a.phase or 'none'})", a.rank) for a in free),
        *(f"  rank {rank}: no answer, {last_seen.get(rank, 'never seen')}" for rank in missing),
        "Ranks behind in a group's collectives:",
        *(_behind(answers) or ["  none that is visible"]),
        "",
        "Last metrics:",
        *_grouped((", ".join(f"{k} {v:g}" for k, v in a.metrics.items()) or "none", a.rank) for a in answers),
        "",
        "Config:",
        config or "  not given",
        "",
        "Stacks, innermost call last:",
    ]
    threads = ((f"thread {name}:\n{stack.rstrip()}", a.rank) for a in answers for name, stack in a.stacks.items())
    return "\n".join([*lines, *_grouped(threads)]) + "\n"


def _grouped(items: Iterable[tuple[str, int]]) -> list[str]:
    """Return one line for each text, with all ranks that gave it."""
    ranks_of: dict[str, list[int]] = {}
    for text, rank in items:
        ranks_of.setdefault(text, []).append(rank)
    shown = [f"  rank{'s' if len(ranks) > 1 else ''} {runs_text(ranks)}: {text}" for text, ranks in ranks_of.items()]
    return shown or ["  none"]


def _behind(answers: Sequence[Answer]) -> list[str]:
    counts: dict[str, dict[int, int]] = {}
    for answer in answers:
        for group, count in answer.collectives.items():
            counts.setdefault(group, {})[answer.rank] = count
    found = []
    for group, of_rank in counts.items():
        most = max(of_rank.values())
        late = {rank: count for rank, count in of_rank.items() if count < most}
        if late:
            listed = ", ".join(f"rank {rank} has launched {count}" for rank, count in late.items())
            found.append(f"  {group}: {listed}, others {most}")
    return found


def _describe_collective(frame: FrameType) -> str:
    values = frame.f_locals
    described = next((_describe_tensor(values[name]) for name in _TENSOR_NAMES if name in values), "")
    where = f" over {describe_group(values['group'])}" if "group" in values else ""
    return f"{frame.f_code.co_name}({described}){where}"


def _describe_tensor(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return f"{len(value)} x {_describe_tensor(value[0])}"
    return ""


def _outside_libraries(frames: Sequence[FrameType]) -> FrameType:
    """Return the innermost frame outside of torch and the standard library: our own line that is being executed."""
    return next((frame for frame in frames if not _LIBRARY.search(frame.f_code.co_filename)), frames[0])


def _line_of(frame: FrameType) -> str:
    code = frame.f_code
    path = os.sep.join(code.co_filename.split(os.sep)[-3:])
    return f"{path}:{frame.f_lineno} in {code.co_name}: {linecache.getline(code.co_filename, frame.f_lineno).strip()}"
