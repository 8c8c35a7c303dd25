"""The engines of the training benchmark, ours and transformers', behind one ``step(batch)``.

Run as a program: ``python train_engines.py OPTIONS``; see ``engine_server``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from engine_server import Stopwatch, best_seconds, matmul_peaks, serve

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.ops import resolve
from megatron.core.optimizer import OptimizerConfig
from tools.workshop.bench.models import Batch
from tools.workshop.bench.train_engine import TrainEngine, micro_batches

LEAN_RECOMPUTE = ("layernorm", "moe_act", "mla_up_proj")
LEARNING_RATE, WEIGHT_DECAY, BETAS = 1e-5, 0.1, (0.9, 0.95)


class MegatronEngine(TrainEngine):
    """This repository's engine on the host.

    ``form`` "lean": weights, gradients and moments in bfloat16 (each update still runs in fp32), and backward makes
    norms, activations and up-projections again instead of keeping them. "fp32": everything in fp32.
    """

    def __init__(self, raw: dict[str, Any], train_ops: str, tokens_per_micro_batch: int, form: str) -> None:
        is_lean = form == "lean"
        self.name = "megatron, bf16 moments" if is_lean else "megatron, fp32"
        dtype = torch.bfloat16 if is_lean else torch.float32
        config = OptimizerConfig(
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            adam_beta2=BETAS[1],
            clip_grad=1.0,
            use_precision_aware_optimizer=is_lean,
            exp_avg_dtype=dtype,
            exp_avg_sq_dtype=dtype,
        )
        super().__init__(
            raw,
            resolve(train_ops),
            "cpu",
            dtype,
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=not is_lean),
            tokens_per_micro_batch,
            recompute_granularity="selective" if is_lean else None,
            recompute_modules=LEAN_RECOMPUTE,
        )


class TransformersEngine:
    """transformers' DeepseekV3ForCausalLM with torch's fused AdamW, on sequences of equal length.

    ``precision`` "bf16" keeps weights and moments in bfloat16, which loses small updates; "fp32" computes in float32.
    """

    def __init__(self, raw: dict[str, Any], precision: str, experts: str, attention: str, micro_tokens: int) -> None:
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

        self.name = f"transformers, {precision}, experts {experts}, attention {attention}"
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

    def step(self, batch: Batch) -> float:
        """Forward, backward and update on all sequences; returns the mean loss of a token."""
        num_labels = batch.num_tokens - len(batch.sequences)
        total = 0.0
        for sequences in micro_batches(batch, self.tokens_per_micro_batch):
            ids_BL = torch.tensor(sequences)
            logits_BLV = self.model(input_ids=ids_BL).logits
            loss = F.cross_entropy(logits_BLV[:, :-1].flatten(0, 1).float(), ids_BL[:, 1:].flatten(), reduction="sum")
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
            engine.step(batch)
            seconds[experts, attention] = best_seconds(lambda engine=engine: engine.step(batch), 1)
    return min(seconds, key=lambda variant: seconds[variant])


class TimedEngine:
    """One engine of the benchmark, its steps timed."""

    def __init__(self, options: dict[str, Any]) -> None:
        raw, micro_tokens = options["model"], options["micro_tokens"]
        kind, _, precision = options["engine"].partition("-")
        self.engine: MegatronEngine | TransformersEngine
        if kind == "megatron":
            self.engine = MegatronEngine(raw, options["train_ops"], micro_tokens, precision)
        else:
            experts, attention = fastest_variant(raw, precision, micro_tokens)
            self.engine = TransformersEngine(raw, precision, experts, attention, micro_tokens)
        self.name = self.engine.name

    def step(self, sequences: list[list[int]]) -> dict[str, float]:
        """Time one step; the peak is of the resident bytes during this step."""
        Path("/proc/self/clear_refs").write_text("5")  # the kernel starts a new peak
        stopwatch = Stopwatch()
        loss = self.engine.step(Batch(tuple(map(tuple, sequences))))
        return stopwatch.read() | {"loss": loss}

    def matmul_peaks(self) -> dict[str, float]:
        return matmul_peaks("bfloat16", "float32")


if __name__ == "__main__":
    serve(TimedEngine)
