"""Compiles each kernel of the CUDA table for a device as the table launches it at real sizes; needs no device.

    python tests/vllm/compiled_cuda_kernels.py sm_90 ["text that a case's name contains"]

prints one line of JSON for each: kernel, case, bytes of shared memory, bytes that registers spill.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm.ops.contract import DecodeMetadata, HeadNorms, PrefillMetadata, RolloutOps, RouterSettings, SamplingBatch
from vllm.ops.cuda import kernels
from vllm.ops.cuda.table import cuda_table
from vllm.ops.weights import BlockScales, Fp8Operand

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages")
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Compiler:
    """The launch of a table: compiles what it does not know yet, and runs nothing."""

    def __init__(self, architecture: int) -> None:
        self.architecture, self.case, self._known = architecture, "", set[str]()

    def __call__(self, name: str, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        kernel = kernels.kernel_called(name)
        constants = {key: value for key, value in options.items() if key not in OPTIONS}
        names = [key for key in kernel.arg_names if key not in constants]
        given, variable = dict(zip(names, arguments, strict=True)), self._variable(kernel)
        # As triton's launcher does: what is 1 becomes a constant, unless the kernel forbids it.
        constants |= {
            key: 1 for key, value in given.items() if type(value) is int and value == 1 and key not in variable
        }
        signature = {key: _type_of(value) for key, value in given.items() if key not in constants}
        aligned = [key for key in signature if key not in variable and _is_aligned(given[key])]
        key = f"{name} {signature} {aligned} {constants} {options}"
        if key in self._known:
            return
        self._known.add(key)
        source = ASTSource(
            kernel,
            signature={key: signature.get(key, "constexpr") for key in kernel.arg_names},
            constexprs=constants,
            attrs={(kernel.arg_names.index(key),): [["tt.divisibility", 16]] for key in aligned},
        )
        target = GPUTarget("cuda", self.architecture, 32)
        compiled = triton.compile(source, target=target, options={k: options[k] for k in OPTIONS if k in options})
        report = {"kernel": name, "case": self.case, "shared": compiled.metadata.shared}
        print(json.dumps(report | {"spilled": self._spilled(compiled.asm["ptx"])}), flush=True)

    @staticmethod
    def _variable(kernel: Any) -> set[str]:
        return {parameter.name for parameter in kernel.params if parameter.do_not_specialize}

    def _spilled(self, ptx: str) -> int:
        name = f"sm_{self.architecture}a" if self.architecture >= 90 else f"sm_{self.architecture}"
        assembler = PTXAS / ("ptxas-blackwell" if self.architecture >= 100 else "ptxas")
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(ptx)
            file.flush()
            command = [str(assembler), "-v", f"--gpu-name={name}", file.name, "-o", "/dev/null"]
            report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        return max(int(found) for found in re.findall(r"(\d+) bytes spill stores", report))


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{POINTERS[value.base.dtype][1:]}{[*value.block_shape]}>".replace(" ", "")
    return "fp32" if isinstance(value, float) else "i32"


def _is_aligned(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.storage_offset() * value.element_size() % 16 == 0
    return isinstance(value, int) and value % 16 == 0


def run_latent(ops: RolloutOps, heads: int, dtype: torch.dtype) -> None:
    """DeepSeek-V3's attention: sequences of up to 8,192 tokens, and a prompt of 4,096."""
    latent, rope, nope, value, tokens = 512, 64, 128, 128, 64
    cache = ops.new_kv_cache(1024, 64, latent, rope, dtype, torch.device("meta"), "nd")
    angles = torch.empty(tokens, rope), torch.empty(tokens, rope)
    q = torch.empty(tokens, heads, nope + rope, dtype=dtype)
    kv = torch.empty(tokens, 1536 + latent + rope, dtype=dtype)[:, 1536:]
    weight, slots = torch.empty(latent, dtype=dtype), torch.empty(tokens, dtype=torch.int64)
    ops.norm_rope_write_kv(cache, kv, weight, 1e-6, angles, slots)
    q_rope = ops.rotary_interleaved(q[..., nope:], angles)
    lens, tables = torch.empty(512, dtype=torch.int32), torch.empty(512, 128, dtype=torch.int32)
    assert ops.mla_decode is not None
    for batch in (1, 512):  # in splits and whole
        meta = DecodeMetadata(np.full(batch, 8192), lens[:batch], tables[:batch], 64)
        q_latent = torch.empty(batch, heads, latent, dtype=dtype)
        ops.mla_decode((q_latent, q_rope[0].expand(batch, heads, rope)), cache, meta, 0.1)
    q = torch.empty(4096, heads, nope + rope, dtype=dtype)
    prompt = PrefillMetadata(np.array([4096]), np.array([4096]), lens[:2], lens[:1], tables[:1], 64)
    kv_b = torch.empty(heads, nope + value, latent, dtype=dtype)
    ops.mla_prefill((q[..., :nope], torch.empty(4096, heads, rope, dtype=dtype)), kv_b, cache, prompt, 0.1)


def run_grouped(ops: RolloutOps, heads: int, kv_heads: int, channels: int, dtype: torch.dtype) -> None:
    """Attention of Qwen3's kind."""
    cache = ops.new_gqa_cache(1024, 16, kv_heads, channels, dtype, torch.device("meta"))
    qkv = torch.empty(4096, heads + 2 * kv_heads, channels, dtype=dtype)
    angles, weight = torch.empty(4096, channels), torch.empty(channels, dtype=dtype)
    lens, tables = torch.empty(64, dtype=torch.int32), torch.empty(64, 512, dtype=torch.int32)
    slots, norms = torch.empty(4096, dtype=torch.int64), HeadNorms(weight, weight, 1e-6)
    q = ops.rope_write_gqa(cache, qkv, None, norms, (angles, angles), slots)
    for batch in (1, 64):
        ops.gqa_decode(q[:batch], cache, DecodeMetadata(np.full(batch, 8192), lens[:batch], tables[:batch], 16), 0.1)
    for most in (20, 4096):
        prompt = PrefillMetadata(np.array([most]), np.array([4096]), lens[:2], lens[:1], tables[:1], 16)
        ops.gqa_prefill(q[:most], cache, prompt, 0.1)


def run_others(ops: RolloutOps, hidden: int, width: int, experts: int, dtype: torch.dtype) -> None:
    """Norms, routing in 8 groups and experts."""
    x, weight = torch.empty(64, hidden, dtype=dtype), torch.empty(hidden, dtype=dtype)
    ops.add_rms_norm(x, ops.rms_norm(x, weight, 1e-6), weight, 1e-6)
    for scoring, bias in (("sigmoid", torch.empty(experts)), ("softmax", None)):
        weights, ids = ops.topk_router(torch.empty(64, experts), bias, RouterSettings(8, 8, 4, True, 2.5, scoring))
    w13, w2 = torch.empty(8, 2 * width, hidden, dtype=dtype), torch.empty(8, hidden, width, dtype=dtype)
    ops.fused_experts(x, (w13, w2), (weights, ids), 0)
    keys = torch.empty(64, 2, dtype=torch.int32), torch.empty(129280, dtype=torch.int32)
    ops.sample(torch.empty(64, 129280), SamplingBatch(torch.empty(64), *keys, None, None, None, True, True))


def held_in_fp8(has_whole_row_blocks: bool, *shape: int) -> Fp8Operand:
    """A weight of whole blocks."""
    scale_inv = torch.empty(*shape[:-2], -(-shape[-2] // 128), shape[-1] // 128)
    rows = torch.empty(shape[-2], dtype=torch.int64)
    values = torch.empty(*shape, dtype=torch.float8_e4m3fn)
    return Fp8Operand(values, BlockScales(scale_inv, rows, None, torch.bfloat16, has_whole_row_blocks))


def run_fp8(ops: RolloutOps, hidden: int, width: int, latents: int) -> None:
    """Products of DeepSeek-V3's kind, of a decode step and of prompts."""
    for tokens, is_whole in ((64, False), (4096, False), (4096, True)):
        x = torch.empty(tokens, hidden, dtype=torch.bfloat16)
        ops.linear(x, held_in_fp8(is_whole, latents, hidden))
        ids, weights = torch.empty(tokens, 8, dtype=torch.int64), torch.empty(tokens, 8)
        matrices = held_in_fp8(is_whole, 32, 2 * width, hidden), held_in_fp8(is_whole, 32, hidden, width)
        ops.fused_experts(x, matrices, (weights, ids), 0)


def cases(multiplies_fp8: bool) -> Iterator[tuple[str, Callable[[RolloutOps], None]]]:
    for dtype in (torch.bfloat16, torch.float32):
        for heads in (16, 128):
            yield f"latent attention of {heads} heads, {dtype}", partial(run_latent, heads=heads, dtype=dtype)
        for heads, kv_heads, channels in ((32, 8, 128), (4, 4, 128), (8, 2, 256)):
            run = partial(run_grouped, heads=heads, kv_heads=kv_heads, channels=channels, dtype=dtype)
            yield f"attention of {heads} heads to {kv_heads} of {channels} channels, {dtype}", run
        yield f"rows and experts, {dtype}", partial(run_others, hidden=7168, width=2048, experts=256, dtype=dtype)
    if multiplies_fp8:
        yield "FP8 products", partial(run_fp8, hidden=7168, width=2048, latents=2112)


def main() -> None:
    compiler, wanted = Compiler(int(sys.argv[1].removeprefix("sm_"))), "".join(sys.argv[2:])
    ops = cuda_table(compiler)
    for name, run in cases(compiler.architecture >= 90):
        if wanted in name:
            compiler.case = name
            with torch.device("meta"):
                run(ops)


if __name__ == "__main__":
    main()
