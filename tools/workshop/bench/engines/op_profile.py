"""Time, bytes and floating-point operations of every tensor operation that runs inside a ``with`` block, on a CPU."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_GRAD = aten._scaled_dot_product_flash_attention_for_cpu_backward
# Operations that read as much of their first tensor as they return, not all of it.
_PICK_ROWS = (aten.index_select, aten.embedding, aten.gather)
# In-place operations that do not read their target; our own kernels' targets are not read either.
_OVERWRITE = (aten.copy_, aten.zero_, aten.fill_)


@dataclass
class OpCost:
    """Operations of one name, part of the model and phase, in one dtype.

    phase: forward, recompute, backward or update · part: the module, without numbers of layers · op: torch's name ·
    num_bytes: each distinct value read or written once per call · flops: of products and attention only.
    """

    phase: str
    part: str
    op: str
    dtype: str
    calls: int = 0
    seconds: float = 0.0
    num_bytes: float = 0.0
    flops: float = 0.0


class OpProfile(TorchDispatchMode):
    """Records every operation but views; ``phase`` is that of the operations outside of a backward pass.

    An operation of a backward pass belongs to the module whose forward made its autograd node. Work between operations
    (Python, autograd, this profile) is in no row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        self.costs: dict[tuple[str, str, str, str], OpCost] = {}
        self._modules: list[str] = []
        self._names: dict[nn.Module, str] = {}

    def watch(self, model: nn.Module) -> None:
        """Name the parts of ``model``."""
        self._names |= {module: re.sub(r"\.\d+", "", name) or "model" for name, module in model.named_modules()}

    def __enter__(self) -> OpProfile:
        self._hooks = [
            register_module_forward_pre_hook(lambda module, _: self._modules.append(self._names.get(module, ""))),
            register_module_forward_hook(self._leave),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:  # moves nothing
            return func(*args, **kwargs)
        start = time.perf_counter()
        out = func(*args, **kwargs)
        seconds = time.perf_counter() - start
        tensors = _tensors((args, kwargs, out))
        phase, part = self._place()
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        key = (phase, part, func.overloadpacket.__name__, dtype)
        cost = self.costs.setdefault(key, OpCost(*key))
        cost.calls += 1
        cost.seconds += seconds
        cost.num_bytes += _num_bytes(func, args, kwargs, out)
        cost.flops += _flops(func, args, kwargs, out)
        return out

    def _place(self) -> tuple[str, str]:
        """Return phase and part of the operation that runs now."""
        is_backward = torch._C._current_graph_task_id() != -1
        if self._modules:
            return "recompute" if is_backward else self.phase, self._modules[-1]
        node = torch._C._current_autograd_node() if is_backward else None
        part = _marks(node).get("part", "") if node is not None else ""
        return "backward" if is_backward else self.phase, part

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Mark the autograd nodes between the module's inputs and outputs that no module inside it has marked."""
        part = self._modules.pop()
        seen = {x.grad_fn for x in _tensors(inputs)}
        pending = [x.grad_fn for x in _tensors(output)]
        while pending:
            node = pending.pop()
            if node is not None and node not in seen:
                seen.add(node)
                _marks(node).setdefault("part", part)
                pending += [before for before, _ in node.next_functions]


def _marks(node: Any) -> dict[str, str]:
    """What an autograd node keeps for its users; torch annotates it as a method."""
    return cast("dict[str, str]", node.metadata)


def _num_bytes(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    if func.overloadpacket is aten.empty:
        return 0
    inputs, outputs = _tensors((args, kwargs)), _tensors(out)
    if func.overloadpacket in _PICK_ROWS:
        return 2 * sum(map(_nbytes, outputs)) + sum(map(_nbytes, inputs[1:]))
    arguments = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    targets = [one for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    written = [x for one in targets for x in _tensors(arguments.get(one.name))] or outputs
    only_written = {id(x) for x in written if func.namespace != "aten" or func.overloadpacket in _OVERWRITE}
    only_written |= {id(x) for one in targets if one.is_out for x in _tensors(arguments.get(one.name))}
    return sum(map(_nbytes, written)) + sum(_nbytes(x) for x in inputs if id(x) not in only_written)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _nbytes(x: Tensor) -> int:
    """Bytes of the distinct values of x."""
    return x.element_size() * math.prod(size for size, step in zip(x.shape, x.stride(), strict=True) if step)


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    packet = func.overloadpacket
    if packet is _ATTENTION:  # (q, k, v, dropout, is_causal)
        return sdpa_flop_count(*(x.shape for x in args[:3])) / (2 if args[4] else 1)
    if packet is _ATTENTION_GRAD:  # (grad, q, k, v, out, lse, dropout, is_causal)
        return sdpa_backward_flop_count(*(x.shape for x in args[:4])) / (2 if args[7] else 1)
    if func.namespace == "megatron_cpu":
        return _our_flops(packet.__name__, *args)
    in_place = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}  # which the registry does not know
    count: Callable[..., float] | None = flop_registry.get(in_place.get(packet, packet))
    return 0.0 if count is None else count(*args, **kwargs, out_val=out)


def _our_flops(name: str, *args: Any) -> float:
    """Those of our attention: per score and head, D + E multiplications forward, and 3 D + 2 E backward."""
    if name not in ("attention", "attention_grad"):
        return 0.0
    spans, (heads, _, key_size, value_size, _, causal) = args[3 + (name == "attention_grad")], args[-8:-2]
    scores = float(spans.diff(dim=1).double().square().sum()) * heads / (2 if causal else 1)
    return 2 * scores * (key_size + value_size if name == "attention" else 3 * key_size + 2 * value_size)
