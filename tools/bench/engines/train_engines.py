"""The engines of the training benchmark, ours and transformers', behind one ``step(batch, is_packed)``.

Run as a program: ``python train_engines.py OPTIONS``; see ``engine_server``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from engine_server import Stopwatch, best_seconds, serve
from op_profile import OpProfile
from torch import nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.ops import resolve
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import initialize_model_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from mindspeed_llm.model import build_model
from tools.bench.models import Batch, parsed

LEAN_RECOMPUTE = ("layernorm", "moe_act", "mla_up_proj")
LEARNING_RATE, WEIGHT_DECAY, BETAS = 1e-5, 0.1, (0.9, 0.95)


class MegatronEngine:
    """This repository's engine in one process, with fp32 master weights.

    ``form`` "": weights in bfloat16, gradients and moments in fp32. "lean": gradients and moments in bfloat16 too (each
    update still runs in fp32), and backward makes norms, activations and up-projections again instead of keeping them.
    "fp32": everything in fp32.
    """

    def __init__(self, raw: dict[str, Any], train_ops: str, tokens_per_micro_batch: int, form: str) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        is_lean = form == "lean"
        self.name = "megatron, fp32" if form == "fp32" else f"megatron, {'bf16' if is_lean else 'fp32'} moments"
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.groups = initialize_model_parallel()
        ops, hf = resolve(train_ops), parsed(raw)
        model = build_model(
            hf,
            self.groups,
            ops,
            params_dtype=torch.float32 if form == "fp32" else torch.bfloat16,
            calculate_per_token_loss=True,
            recompute_granularity="selective" if is_lean else None,
            recompute_modules=LEAN_RECOMPUTE,
        )
        model.init_weights(0)
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=not is_lean)
        self.model = DistributedDataParallel(model.config, ddp_config, model, self.groups)
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
        self.optimizer = get_megatron_optimizer(config, self.model, self.groups, ops)

    def step(self, batch: Batch, is_packed: bool) -> float:
        """Forward, backward and update on all sequences; returns the mean loss of a token.

        Without packing every micro-batch is padded to its longest sequence.
        """
        loss = self._gradients(batch, is_packed)
        self.optimizer.step()
        return loss

    def profile(self, batch: Batch) -> dict[str, Any]:
        """One packed step: its seconds, and what each of its operations took."""
        with OpProfile() as profile:
            profile.watch(self.model.module)
            start = time.perf_counter()
            self._gradients(batch, is_packed=True)
            profile.phase = "update"
            self.optimizer.step()
            seconds = time.perf_counter() - start
        return {"seconds": seconds, "ops": [asdict(cost) for cost in profile.costs.values()]}

    def _gradients(self, batch: Batch, is_packed: bool) -> float:
        num_labels = batch.num_tokens - len(batch.sequences)
        micro_batches = list(_micro_batches(batch, self.tokens_per_micro_batch, is_packed))

        def forward_step(rest: Iterator[list[tuple[int, ...]]], model: nn.Module) -> tuple[torch.Tensor, Callable]:
            ids_T, positions_T, labels_T, weights_T, packed = _packed(next(rest), is_packed)
            losses_T = model(ids_T, positions_T, packed, labels_T)

            def loss_func(losses_T: torch.Tensor) -> tuple[torch.Tensor, float]:
                loss = (losses_T * weights_T).sum() / num_labels
                return loss, loss.item()

            return losses_T, loss_func

        self.optimizer.zero_grad()
        losses = get_forward_backward_func(self.groups)(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=self.model,
            num_microbatches=len(micro_batches),
            seq_length=self.tokens_per_micro_batch,
            micro_batch_size=1,
        )
        finalize_model_grads(self.model, self.groups)
        return sum(losses)


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
        for sequences in _micro_batches(batch, self.tokens_per_micro_batch, False):
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


def _micro_batches(batch: Batch, max_tokens: int, is_packed: bool) -> Iterator[list[tuple[int, ...]]]:
    """Sequences in order, as many as fit: by their tokens when packed, by rows of the longest one otherwise."""
    current: list[tuple[int, ...]] = []
    for ids in batch.sequences:
        longest = max(map(len, [*current, ids]))
        size = sum(map(len, current)) + len(ids) if is_packed else (len(current) + 1) * longest
        if current and size > max_tokens:
            yield current
            current = []
        current.append(ids)
    yield current


def _packed(
    sequences: list[tuple[int, ...]], is_packed: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, PackedSeqParams]:
    """ids, positions, labels, loss weights [T] and bounds; padded rows count as sequences of the longest length."""
    longest = max(map(len, sequences))
    lengths = [len(ids) if is_packed else longest for ids in sequences]
    rows = [[*ids, *[0] * (length - len(ids))] for ids, length in zip(sequences, lengths, strict=True)]
    ids_T = torch.tensor([token for row in rows for token in row])
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    labels_T = torch.tensor([token for row in rows for token in [*row[1:], 0]])
    weights_T = torch.tensor(
        [float(i < len(ids) - 1) for ids, length in zip(sequences, lengths, strict=True) for i in range(length)]
    )
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return ids_T, positions_T, labels_T, weights_T, PackedSeqParams(bounds, longest)


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
