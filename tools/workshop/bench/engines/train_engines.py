"""The engines of the training benchmark, ours and transformers', behind one ``step(batch, is_packed)``.

Run as a program: ``python train_engines.py OPTIONS``; see ``engine_server``.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from engine_server import Stopwatch, best_seconds, serve
from op_profile import OpProfile

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.ops import resolve
from megatron.core.optimizer import OptimizerConfig
from tools.workshop.bench.models import Batch
from tools.workshop.bench.train_engine import TrainEngine, micro_batches

LEAN_RECOMPUTE = ("layernorm", "moe_act", "mla_up_proj")
LEARNING_RATE, WEIGHT_DECAY, BETAS = 1e-5, 0.1, (0.9, 0.95)


class MegatronEngine(TrainEngine):
    """This repository's engine on the host.

    ``form`` "": weights in bfloat16, gradients and moments in fp32. "lean": gradients and moments in bfloat16 too (each
    update still runs in fp32), and backward makes norms, activations and up-projections again instead of keeping them.
    "fp32": everything in fp32.
    """

    def __init__(self, raw: dict[str, Any], train_ops: str, tokens_per_micro_batch: int, form: str) -> None:
        is_lean = form == "lean"
        self.name = "megatron, fp32" if form == "fp32" else f"megatron, {'bf16' if is_lean else 'fp32'} moments"
        moments = torch.bfloat16 if is_lean else torch.float32
        config = OptimizerConfig(
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            adam_beta2=BETAS[1],
            clip_grad=1.0,
            use_precision_aware_optimizer=is_lean,
            exp_avg_dtype=moments,
            exp_avg_sq_dtype=moments,
        )
        super().__init__(
            raw,
            resolve(train_ops),
            "cpu",
            torch.float32 if form == "fp32" else torch.bfloat16,
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=not is_lean),
            tokens_per_micro_batch,
            recompute_granularity="selective" if is_lean else None,
            recompute_modules=LEAN_RECOMPUTE,
        )

    def profile(self, batch: Batch) -> dict[str, Any]:
        """One packed step: its seconds, and what each of its operations took."""
        with OpProfile() as profile:
            profile.watch(self.model.module)
            start = time.perf_counter()
            self.gradients(batch)
            profile.phase = "update"
            self.optimizer.step()
            seconds = time.perf_counter() - start
        return {"seconds": seconds, "ops": [asdict(cost) for cost in profile.costs.values()]}


class TransformersEngine:
    """transformers' DeepseekV3ForCausalLM with torch's fused AdamW; padded batches, as its users run it.

    ``precision`` "bf16" keeps weights and moments in bfloat16, which loses small updates; "autocast" keeps them in
    float32, as this repository's engine does, and computes in bfloat16; "fp32" computes in float32 too.
    """

    def __init__(self, raw: dict[str, Any], precision: str, experts: str, attention: str, micro_tokens: int) -> None:
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

        self.name = f"transformers, {precision}, experts {experts}, attention {attention}"
        self.precision = precision
        self.tokens_per_micro_batch = micro_tokens
        known = {key: value for key, value in raw.items() if key not in ("topk_method", "scoring_func", "torch_dtype")}
        torch.manual_seed(0)
        self.model = DeepseekV3ForCausalLM._from_config(
            DeepseekV3Config(**known, use_cache=False),
            dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
            attn_implementation=attention,
            experts_implementation=experts,
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, betas=BETAS, fused=True
        )

    def step(self, batch: Batch, is_packed: bool) -> float:
        """See ``MegatronEngine``; there is no packing, ``is_packed`` must be False."""
        assert not is_packed, "transformers is measured on padded batches"
        num_labels = batch.num_tokens - len(batch.sequences)
        total = 0.0
        for sequences in micro_batches(batch, self.tokens_per_micro_batch, False):
            longest = max(map(len, sequences))
            ids_BL = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in sequences])
            mask_BL = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in sequences])
            labels_BL = ids_BL[:, 1:].masked_fill(mask_BL[:, 1:] == 0, -100)
            is_full = bool(mask_BL.all())
            with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "autocast"):
                logits_BLV = self.model(input_ids=ids_BL, attention_mask=None if is_full else mask_BL).logits
            loss = F.cross_entropy(logits_BLV[:, :-1].flatten(0, 1).float(), labels_BL.flatten(), reduction="sum")
            loss = loss / num_labels
            loss.backward()
            total += loss.item()
            del logits_BLV, loss
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def fastest_variant(raw: dict[str, Any], precision: str, micro_tokens: int) -> tuple[str, str]:
    """(experts, attention) of transformers that steps quickest on a two-layer cut of the model.

    Not tried: experts "batched_mm", which copies an expert's weights for every token (12 GiB for 1,024 tokens here).
    """
    small = raw | {"num_hidden_layers": 2, "vocab_size": 1024}
    batch = Batch((tuple(range(256)),) * 4)
    seconds: dict[tuple[str, str], float] = {}
    for experts in ("eager", "grouped_mm"):
        for attention in ("sdpa", "eager"):
            engine = TransformersEngine(small, precision, experts, attention, micro_tokens)
            engine.step(batch, False)
            seconds[experts, attention] = best_seconds(lambda engine=engine: engine.step(batch, False), 1)
    return min(seconds, key=lambda variant: seconds[variant])


class TimedEngine:
    """One engine of the benchmark, its steps timed."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        raw, micro_tokens = options["model"], options["micro_tokens"]
        kind, _, precision = options["engine"].partition("-")
        self.engine: MegatronEngine | TransformersEngine
        if kind == "megatron":
            self.engine = MegatronEngine(raw, options["train_ops"], micro_tokens, precision)
        else:
            experts, attention = fastest_variant(raw, precision, micro_tokens)
            self.engine = TransformersEngine(raw, precision, experts, attention, micro_tokens)
        self.name = self.engine.name

    def step(self, sequences: list[list[int]], is_packed: bool) -> dict[str, float]:
        """Time one step; the peak is of the resident bytes during this step."""
        Path("/proc/self/clear_refs").write_text("5")  # the kernel starts a new peak
        stopwatch = Stopwatch()
        loss = self.engine.step(Batch(tuple(map(tuple, sequences))), is_packed)
        return stopwatch.read() | {"loss": loss}

    def profile(self, sequences: list[list[int]]) -> dict[str, Any]:
        """One packed step by operation, and the least time of each at the rates measured right before it."""
        assert isinstance(self.engine, MegatronEngine), "only our engine's step is profiled"
        rates = {"peaks": self.matmul_peaks(), "bytes_per_s": _copy_rate()}
        return rates | self.engine.profile(Batch(tuple(map(tuple, sequences))))

    def matmul_peaks(self) -> dict[str, float]:
        """Floating-point operations per second of large square matmuls, the best of several, by dtype."""
        peaks = {}
        for dtype in (torch.bfloat16, torch.float32):
            left, right = (torch.randn(2048, 2048, dtype=dtype) for _ in range(2))
            seconds = best_seconds(lambda left=left, right=right: left @ right, 3)
            peaks[str(dtype).removeprefix("torch.")] = 2 * 2048**3 / seconds
        return peaks


def _copy_rate() -> float:
    """Bytes read and written per second by a copy that no cache holds, the best of several."""
    source = torch.ones(1 << 26)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_seconds(lambda: target.copy_(source), 4)


if __name__ == "__main__":
    serve(TimedEngine)
