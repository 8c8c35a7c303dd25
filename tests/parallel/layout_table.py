"""``python -m tests.parallel.layout_table``: every parallel layout beside one process, and how far it is from it.

Each layout makes one training step of the same small model on the same eight micro-batches, in fp32, packed, with the
distributed optimizer and tiny buckets. Compared are the loss, the gradient norm and every gradient, element by element
where its owner keeps it: with ``adam_beta1`` 0 the first moment after one step is the gradient that the optimizer saw.
"""

from __future__ import annotations

import argparse
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.context_parallel import zigzag_indices
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import make_gpt_model
from megatron.core.ops import reference_ops
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_layout import ParallelLayout, RankCoords
from megatron.core.parallel_state import ProcessGroups, destroy_model_parallel, initialize_from_layout
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from tests.parallel.launcher import run_ranks

TOLERANCE = 1e-5
NUM_LAYERS = 8
_COMMON: dict[str, Any] = {
    "num_layers": NUM_LAYERS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
    "vocab_size": 48,
    "init_method_std": 0.1,
    "calculate_per_token_loss": True,
}
MODELS: dict[str, TransformerConfig] = {
    "deepseek_v3": MLATransformerConfig(
        **_COMMON,
        num_moe_experts=8,
        moe_ffn_hidden_size=16,
        moe_shared_expert_intermediate_size=16,
        moe_layer_freq=(0, 1, 1, 1, 0, 1, 1, 1),
        moe_router_topk=2,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_router_topk_scaling_factor=2.5,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=8,
    ),
    "qwen3": TransformerConfig(**_COMMON, num_query_groups=2, kv_channels=8, qk_layernorm=True),
}
MODELS["deepseek_v3 with MTP"] = replace(MODELS["deepseek_v3"], mtp_num_layers=2, mtp_loss_scaling_factor=0.5)
MODELS["deepseek_v3 with balance losses"] = replace(
    MODELS["deepseek_v3"],
    moe_aux_loss_coeff=0.01,
    moe_router_load_balancing_type="seq_aux_loss",
    moe_z_loss_coeff=0.001,
)
MODELS["qwen3, tied"] = replace(MODELS["qwen3"], share_embeddings_and_output_weights=True)
# Every length divides by 8, so that context parallelism up to 4 adds no padding.
_LENGTHS = ([8, 16], [24], [8, 8, 16], [16, 8], [32], [8, 24], [16], [40, 8])


@dataclass(frozen=True)
class Case:
    """One row of the table; ``changes`` are fields of the model's config."""

    layout: ParallelLayout
    note: str = ""
    model: str = "deepseek_v3"
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Sizes of all axes that are not 1, and the note."""
        at = self.layout
        sizes = {
            "TP": at.tensor_model_parallel_size,
            "PP": at.pipeline_model_parallel_size,
            "VPP": at.virtual_pipeline_model_parallel_size,
            "CP": at.context_parallel_size,
            "DP": at.data_parallel_size,
            "EP": at.expert_model_parallel_size,
            "ETP": at.expert_tensor_parallel_size,
        }
        text = " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
        return ", ".join(part for part in (self.model, text, self.note) if part)


def _case(world_size: int, note: str = "", model: str = "deepseek_v3", **sizes: Any) -> Case:
    axes = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "vpp": "virtual_pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
    }
    fields = {axes.get(key, key): value for key, value in sizes.items() if key != "changes"}
    return Case(ParallelLayout(world_size=world_size, **fields), note, model, sizes.get("changes", {}))


_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
_SELECTIVE = {
    "recompute_granularity": "selective",
    "recompute_modules": ("mla_up_proj", "core_attn", "moe_act", "layernorm", "mlp"),
}
_MOE = {"recompute_granularity": "selective", "recompute_modules": ("moe",)}

CASES = [
    _case(1, "full recompute", changes=_FULL),
    _case(1, "selective recompute", changes=_SELECTIVE),
    # Each axis alone.
    _case(2, tp=2),
    _case(2, pp=2),
    _case(2),
    _case(2, cp=2),
    _case(2, ep=2),
    _case(2, tp=2, ep=2, note="TP extends EP"),
    _case(2, tp=2, etp=2),
    _case(2, tp=2, note="down-projections split", mla_down_proj_column_parallel=True),
    _case(2, pp=2, vpp=2),
    _case(2, pp=2, num_layer_list=(5, 3), note="layers 5,3"),
    _case(2, pp=2, num_layers_in_last_pipeline_stage=3, note="last stage 3"),
    _case(2, pp=2, noop_layers=(0, 9), note="no-op layers 0,9"),
    _case(2, cp=2, note="all-gather", changes={"cp_comm_type": "all_gather"}),
    _case(2, cp=2, note="all-to-all", changes={"cp_comm_type": "a2a"}),
    _case(4, tp=2, cp=2, note="latents travel", changes={"cp_send_latents": True}),
    _case(2, ep=2, note="tokens by all-gather", changes={"moe_token_dispatcher_type": "allgather"}),
    _case(2, model="qwen3", tp=2),
    _case(2, model="qwen3", cp=2),
    _case(2, model="qwen3, tied", tp=2),
    _case(2, model="qwen3, tied", pp=2),
    _case(2, model="deepseek_v3 with MTP", tp=2, ep=2),
    _case(2, model="deepseek_v3 with MTP", cp=2),
    # The recipes' combinations, shrunk, and others.
    _case(4, cp=4),
    _case(4, tp=2, pp=2, ep=2, num_layer_list=(5, 3), note="layers 5,3"),
    _case(4, tp=2, ep=4, note="TP extends EP, full recompute", changes=_FULL),
    _case(4, pp=4, vpp=2, note="block recompute", changes=_BLOCK),
    _case(4, tp=2, ep=2, etp=2, note="selective recompute", changes=_SELECTIVE),
    _case(4, tp=2, cp=2, ep=4, note="MoE recompute", changes=_MOE),
    _case(4, ep=2, cp=2, order="tp-ep-dp-cp-pp", note="order tp-ep-dp-cp-pp"),
    _case(4, model="qwen3", tp=2, pp=2, vpp=2),
    _case(4, model="deepseek_v3 with balance losses", tp=2, cp=2, etp=2, note="full recompute", changes=_FULL),
    _case(4, model="deepseek_v3 with balance losses", pp=2, vpp=2, ep=2),
    _case(4, model="qwen3, tied", pp=2, vpp=2),
    _case(4, model="qwen3, tied", tp=2, pp=2),
    _case(4, model="deepseek_v3 with MTP", tp=2, pp=2, vpp=2, ep=2, note="full recompute", changes=_FULL),
    _case(4, model="deepseek_v3 with MTP", pp=2, cp=2, ep=2, note="selective recompute", changes=_SELECTIVE),
    _case(8, tp=2, pp=2, ep=4, note="r1_zero: TP extends EP, DP 2, full recompute", changes=_FULL),
    _case(8, tp=2, pp=2, cp=2, ep=4, note="slime: ETP 1, last stage 3", num_layers_in_last_pipeline_stage=3),
    _case(8, tp=2, pp=4, ep=1, etp=2, note="Pai: ETP is TP, layers 1,3,3,1", num_layer_list=(1, 3, 3, 1)),
    _case(
        8,
        tp=2,
        pp=2,
        ep=2,
        etp=2,
        note="Pai: down-projections split, layers 3,5",
        num_layers_in_first_pipeline_stage=3,
        num_layers_in_last_pipeline_stage=5,
        mla_down_proj_column_parallel=True,
        changes=_SELECTIVE,
    ),
    _case(4, tp=2, cp=2, etp=2, note="down-projections split", mla_down_proj_column_parallel=True),
    _case(
        4, model="deepseek_v3 with MTP", tp=2, pp=2, note="down-projections split", mla_down_proj_column_parallel=True
    ),
    _case(8, tp=2, pp=2, vpp=2, ep=2, note="VPP 2, block recompute", changes=_BLOCK),
    _case(16, pp=4, ep=4, note="r1_ascend: TP1 PP4 EP4"),
]


@dataclass(frozen=True)
class Whole:
    """What one process computes: loss, norm and gradients by layout-independent name."""

    loss: float
    grad_norm: float
    grads: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """How far a layout is from one process, relative; ``worst`` is the parameter with the largest difference.

    A gradient's difference is the largest of its elements', relative to the largest element of the whole gradient.
    """

    loss: float
    grad_norm: float
    grad: float
    worst: str

    @property
    def is_exact(self) -> bool:
        """Whether everything is within the tolerance."""
        return max(self.loss, self.grad_norm, self.grad) <= TOLERANCE


@dataclass(frozen=True)
class MicroBatch:
    """Packed tokens [T] of one rank, with a weight [T] for each one's loss."""

    input_ids_T: torch.Tensor
    position_ids_T: torch.Tensor
    labels_T: torch.Tensor
    weight_T: torch.Tensor
    packed: PackedSeqParams


def micro_batches(vocab_size: int, cp_size: int, cp_rank: int) -> list[MicroBatch]:
    """All micro-batches of the step, of each the tokens that a context-parallel rank holds."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for lengths in _LENGTHS:
        ids_T = torch.randint(vocab_size, (sum(lengths),), generator=generator)
        weight_T = torch.rand(len(ids_T), generator=generator) / 10
        positions_T = torch.cat([torch.arange(n) for n in lengths])
        bounds = torch.tensor([0, *lengths]).cumsum(0).int()
        whole = (ids_T, positions_T, ids_T.roll(-1), weight_T)
        mine = zigzag_indices(bounds, cp_size, cp_rank) if cp_size > 1 else slice(None)
        batches.append(MicroBatch(*(tensor[mine] for tensor in whole), PackedSeqParams(bounds, max(lengths))))
    return batches


def compare(
    cases: Sequence[Case], timeout_s: float = 240, num_micro_batches: int = len(_LENGTHS)
) -> Iterator[tuple[Case, Difference]]:
    """Run every case on as many gloo processes as it has ranks, with the first so many of the micro-batches."""
    models = dict.fromkeys(case.model for case in cases)
    # As bytes: each tensor handed to a new process is an open file, of which there may be 250.
    wholes = pickle.dumps({model: run_ranks(_whole, 1, model, num_micro_batches)[0] for model in models})
    for world_size in sorted({case.layout.world_size for case in cases}):
        of_size = [case for case in cases if case.layout.world_size == world_size]
        by_rank = run_ranks(_differences, world_size, of_size, wholes, num_micro_batches, timeout_s=timeout_s)
        for case, found in zip(of_size, zip(*by_rank, strict=True), strict=True):
            furthest = max(found, key=lambda difference: difference.grad)
            losses, norms = ([getattr(one, name) for one in found] for name in ("loss", "grad_norm"))
            yield case, replace(furthest, loss=max(losses), grad_norm=max(norms))


def _whole(model: str, num_micro_batches: int) -> Whole:
    loss, grad_norm, shards, _ = _one_step(Case(ParallelLayout(), model=model), num_micro_batches)
    return Whole(loss, grad_norm, {name: grad.view(shape) for name, shape, _, grad in shards})


def _differences(cases: Sequence[Case], pickled_wholes: bytes, num_micro_batches: int) -> list[Difference]:
    wholes: dict[str, Whole] = pickle.loads(pickled_wholes)
    return [_difference(case, wholes[case.model], num_micro_batches) for case in cases]


def _difference(case: Case, whole: Whole, num_micro_batches: int) -> Difference:
    loss, grad_norm, shards, at = _one_step(case, num_micro_batches)
    furthest, worst = 0.0, ""
    for name, shape, start, grad in shards:
        full = whole.grads[name]
        part = local_part(name, full, case.layout, at)
        assert part.shape == torch.Size(shape), f"{case.name}: {name} is {tuple(shape)}, expected {tuple(part.shape)}"
        largest = (grad - part.flatten()[start : start + len(grad)]).abs().max() / full.abs().max()
        if not largest.item() <= furthest:
            furthest, worst = largest.item(), name
    return Difference(abs(loss / whole.loss - 1), abs(grad_norm / whole.grad_norm - 1), furthest, worst)


Shards = list[tuple[str, tuple[int, ...], int, torch.Tensor]]


def _one_step(case: Case, num_micro_batches: int) -> tuple[float, float, Shards, RankCoords]:
    """Loss of the whole batch, gradient norm, (global name, local shape, first element, gradient) ..., coordinates."""
    groups = initialize_from_layout(case.layout)
    config = replace(MODELS[case.model], sequence_parallel=case.layout.tensor_model_parallel_size > 1, **case.changes)
    model = make_gpt_model(config, groups, reference_ops())
    model.init_weights(7)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(bucket_size=2000), model, groups)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-3, adam_beta1=0.0, clip_grad=0.0), ddp, groups, reference_ops()
    )
    loss = _forward_backward(ddp, config, groups, num_micro_batches)
    finalize_model_grads(ddp, groups)
    is_updated, grad_norm, _ = optimizer.step()
    assert is_updated
    names = _global_names(ddp, case.layout, groups.coords.pp)
    shards = [
        (names[shard.name], shard.shape, shard.start, shard.tensors["exp_avg"].clone())
        for shard in optimizer.param_shards()
    ]
    destroy_model_parallel()
    return loss, grad_norm, shards, groups.coords


def _forward_backward(
    ddp: DistributedDataParallel, config: TransformerConfig, groups: ProcessGroups, num_micro_batches: int
) -> float:
    layout = groups.layout
    batches = micro_batches(config.vocab_size, layout.context_parallel_size, groups.coords.cp)
    own = batches[groups.coords.dp : num_micro_batches : layout.data_parallel_size]

    def forward_step(rest: Iterator[MicroBatch], model: nn.Module) -> tuple[torch.Tensor, Callable]:
        batch = next(rest)

        def loss_func(logits_TV: torch.Tensor) -> tuple[torch.Tensor, float]:
            loss = (
                vocab_parallel_cross_entropy(logits_TV, batch.labels_T, groups.tp, reference_ops()) * batch.weight_T
            ).sum()
            return loss, loss.item()

        # The weights are also those of the losses of multi-token prediction, where the model has it.
        return model(batch.input_ids_T, batch.position_ids_T, batch.packed, loss_mask_W=batch.weight_T), loss_func

    losses = get_forward_backward_func(groups)(
        forward_step_func=forward_step,
        data_iterator=iter(own),
        model=ddp,
        tensor_shapes=[(len(batch.input_ids_T) // groups.tp.size(), config.hidden_size) for batch in own],
    )
    # Every rank of the last stage knows its own part; all others hear it from there.
    total = torch.tensor(sum(losses), dtype=torch.float64)
    if groups.is_last_stage:
        dist.all_reduce(total, group=groups.dp_cp)
    dist.broadcast(total, dist.get_process_group_ranks(groups.pp)[-1], group=groups.pp)
    return total.item()


def _global_names(ddp: DistributedDataParallel, layout: ParallelLayout, stage: int) -> dict[str, str]:
    """Name of a parameter on this rank -> its name in a model of one process."""
    names = {}
    for name, param in ddp.module.named_parameters():
        chunk = re.match(r"chunks\.(\d+)\.", name)
        layers = layout.chunk_layers(stage, int(chunk[1]) if chunk else 0, NUM_LAYERS)
        parts = (name.removeprefix(chunk[0]) if chunk else name).split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(layers[int(parts[2])])
        names[name] = ".".join(parts)
        if names[name] == "output_layer.weight" and getattr(param, "shared_embedding", False):
            names[name] = "embedding.word_embeddings.weight"
    return names


def local_part(name: str, whole: torch.Tensor, layout: ParallelLayout, at: RankCoords) -> torch.Tensor:
    """What the rank at ``at`` holds of the parameter ``name`` (or its gradient), given all of it."""
    tp, etp = layout.tensor_model_parallel_size, layout.expert_tensor_parallel_size
    if ".experts.weight1" in name:
        halves = whole.chunk(layout.expert_model_parallel_size)[at.ep].chunk(2, dim=2)
        return torch.cat([half.chunk(etp, dim=2)[at.etp] for half in halves], dim=2)
    if ".experts.weight2" in name:
        return whole.chunk(layout.expert_model_parallel_size)[at.ep].chunk(etp, dim=1)[at.etp]
    if "linear_fc1" in name:  # gate and up are cut apart
        return torch.cat([half.chunk(tp)[at.tp] for half in whole.chunk(2)])
    if layout.mla_down_proj_column_parallel and "_down_proj" in name:
        return whole.chunk(tp)[at.tp]
    if re.search(r"word_embeddings|output_layer|_up_proj|linear_q_proj|eh_proj", name):
        return whole.chunk(tp)[at.tp]
    if "linear_qkv" in name:  # groups of query heads, each with its key and value, follow one another
        return whole.chunk(tp)[at.tp]
    if re.search(r"linear_proj|linear_fc2", name):
        return whole.chunk(tp, dim=1)[at.tp]
    return whole


def main() -> int:
    """Print the table; exit code 1 when a layout is not within the tolerance."""
    parser = argparse.ArgumentParser(prog="python -m tests.parallel.layout_table", description=__doc__)
    parser.add_argument("--only", default="", help="rows whose name holds this text")
    only = parser.parse_args().only
    cases = [case for case in CASES if only in case.name]
    print(f"{'layout':72} {'ranks':>5} {'loss':>8} {'norm':>8} {'gradient':>8}  worst parameter")
    failed = 0
    for case, found in compare(cases):
        failed += not found.is_exact
        sign = "" if found.is_exact else "  <-- over the tolerance"
        print(
            f"{case.name:72} {case.layout.world_size:5} {found.loss:8.1e} {found.grad_norm:8.1e} {found.grad:8.1e}  "
            f"{found.worst}{sign}",
            flush=True,
        )
    print(f"{len(cases)} layouts, {len(cases) - failed} within {TOLERANCE:g} of one process")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
