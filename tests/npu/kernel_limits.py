"""CANN's documented sizes of the kernels, for calls at a real model's sizes; the simulator's references take more.

After the pages of each op for CANN 8.2 on A3. ``Watch`` looks at every npu op that runs inside of it, fake tensors too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

HALF = (torch.float16, torch.bfloat16)
Arguments = dict[str, Any]


def fusion_attention(call: Arguments) -> bool:
    query, key, value = call["query"], call["key"], call["value"]
    is_packed = call["input_layout"] == "TND"
    sizes_fit = query.shape[-1] == key.shape[-1] <= 768 and (value.shape[-1] == query.shape[-1] or not is_packed)
    return sizes_fit and call["head_num"] <= 256 and len(query) <= 2**20


def infer_attention(call: Arguments) -> bool:
    query, rope, heads, page = call["query"], call["query_rope"], call["num_heads"], call["block_size"]
    is_page = page % 16 == 0 < page <= 512
    if rope is None:  # grouped queries, [B, 1, N D]
        size, groups = query.shape[-1] // heads, heads // (call["num_key_value_heads"] or heads)
        return query.dtype in HALF and is_page and size % 16 == 0 < size <= 512 and heads <= 256 and groups <= 64
    is_deepseek = query.shape[-1] == 512 and rope.shape[-1] == 64
    takes_pages = is_page and (call["key"].dim() < 5 or call["input_layout"] != "BNSD")
    return query.dtype in HALF and is_deepseek and heads in (32, 64, 128) and takes_pages


def gating(call: Arguments) -> bool:
    groups = (call["k_group"], call["group_count"])
    return call["x"].shape[1] == 256 and groups == (4, 8) and call["k"] <= 32 and call["bias"] is not None


def grouped_matmul(call: Arguments) -> bool:
    tensors = [*call["x"], *call["weight"]]
    return len(call["group_list"]) <= 1024 and all(max(tensor.shape[1:]) < 65536 for tensor in tensors)


def grouped_matmul_add(call: Arguments) -> bool:
    """ATB's page of the same kernel names 128 groups and sizes below 65536, aclnn's page names neither."""
    rows_fit = call["x"].dtype in HALF and call["x"].dtype == call["weight"].dtype and len(call["x"]) > 0
    sizes_fit = max(call["x"].shape[1], call["weight"].shape[1]) < 65536
    return rows_fit and sizes_fit and call["input"].dtype == torch.float32 and len(call["group_list"]) <= 128


def last_size(limit: int, name: str = "input") -> Callable[[Arguments], bool]:
    return lambda call: call[name].shape[-1] <= limit


LIMITS: dict[str, Callable[[Arguments], bool]] = {
    "npu_fusion_attention": fusion_attention,
    "npu_fused_infer_attention_score": infer_attention,
    "npu_moe_gating_top_k": gating,
    "npu_grouped_matmul": grouped_matmul,
    "npu_grouped_matmul_add_": grouped_matmul_add,
    "npu_moe_token_permute": last_size(512, "indices"),
    "npu_rotary_mul": last_size(896),
    "npu_interleave_rope": lambda call: call["x"].shape[-1] == 64 and call["x"].dtype in HALF,
    "npu_kv_rmsnorm_rope_cache": lambda call: call["kv"].shape[-1] == 512 + 64 and call["kv"].dtype in HALF,
}


class Watch(TorchDispatchMode):
    """Collects the calls inside of it that are outside of their kernel's limits."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.problems: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = op._schema.name.removeprefix("npu::")
        if name in LIMITS:
            self.seen.add(name)
            declared = op._schema.arguments
            call = {argument.name: argument.default_value for argument in declared}
            call |= {argument.name: value for argument, value in zip(declared, args, strict=False)} | kwargs
            if not LIMITS[name](call):
                forms = {key: _form(value) for key, value in call.items() if value is not None}
                self.problems.append(f"{name} is outside of its kernel's limits: {forms}")
        return op(*args, **kwargs)


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (*value.shape, value.dtype)
    return [_form(item) for item in value] if isinstance(value, list) else value
