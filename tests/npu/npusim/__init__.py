"""An Ascend device that is not there: the real torch_npu on a fake CANN, its arithmetic done by CPU kernels.

`import torch` loads it by itself in an environment made by tests/npu/env.sh, through torch's plug-in entry points.
"""

from collections import Counter
from typing import NamedTuple

_is_loaded = False


class CommunicatorSettings(NamedTuple):
    """What a communicator was asked for; 0 is HCCL's default."""

    num_ranks: int
    buffer_mib: int
    expansion_mode: int  # 1 host, 2 control processor, 3 vector cores


def autoload() -> None:
    """Called by `import torch`: loads the fake libraries, torch_npu, the CPU kernels and every reference."""
    global _is_loaded
    if _is_loaded:
        return
    _is_loaded = True
    import ctypes

    import torch

    from npusim.build import LOAD_ORDER, library_dir

    libraries = library_dir()
    for name in LOAD_ORDER:  # by path, so that an older LD_LIBRARY_PATH cannot bring in an older build
        ctypes.CDLL(str(libraries / f"{name}.so"), mode=ctypes.RTLD_GLOBAL)
    import torch_npu

    torch.ops.load_library(str(libraries / "libnpusim.so"))
    torch.ops.npusim.install()
    from npusim import aten_overrides, graph_tasks, references

    graph_tasks.connect(ctypes.CDLL(str(libraries / "libascendcl.so")))
    aten_overrides.install()
    references.load_all()
    assert torch_npu is not None


def calls() -> Counter[str]:
    """How often each op ran on the device since the last `reset_calls`: `aten::mm`, `npu_rms_norm`, ..."""
    import torch

    lines = (line.rsplit(" ", 1) for line in torch.ops.npusim.calls().splitlines())
    return Counter({name: int(times) for name, times in lines})


class TypedCall(NamedTuple):
    """An op of one phase: ``types`` are its tensors', results after an arrow; " async" after a copy without
    waiting, " sized" where the caller gave the size of the result, " strided" where a batched product copies an operand
    first.

    ``host:``, ``pinned:`` and, for a single number, ``scalar:`` mark tensors of the host. A phase's own line, whose
    ``op`` is empty, says how often the phase came.
    """

    phase: str  # names of the open torch.profiler.record_function, outermost first, joined by slashes
    op: str
    types: str
    times: int


def typed_calls() -> list[TypedCall]:
    """The same calls by phase and by types of tensors, without what a Python reference replays in a graph."""
    import torch

    lines = (line.split("\t") for line in torch.ops.npusim.typed_calls().splitlines())
    return [TypedCall(phase, op, types, int(times)) for phase, op, types, times in lines]


def reset_calls() -> None:
    """Starts `calls` again from nothing."""
    import torch

    torch.ops.npusim.reset_calls()


def communicators() -> list[CommunicatorSettings]:
    """The settings of every communicator that this process has made, in the order in which it made them."""
    import ctypes

    from npusim.build import library_dir

    report = ctypes.CDLL(str(library_dir() / "libhccl.so")).npusim_communicator_settings
    report.restype = ctypes.c_char_p
    return [CommunicatorSettings(*map(int, line.split())) for line in report().decode().splitlines()]
