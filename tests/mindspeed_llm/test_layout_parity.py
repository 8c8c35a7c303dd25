"""Gradients of models of several ranks, under HF names, are those of transformers in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_formats.config import load_hf_config
from megatron.core.context_parallel import zigzag_indices
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.ops import reference_ops
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import ProcessGroups, destroy_model_parallel, initialize_from_layout
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from mindspeed_llm.hf_checkpoint import HFCheckpoint
from mindspeed_llm.load_weights import load_weights
from mindspeed_llm.model import build_model
from mindspeed_llm.weight_plan import local_plan
from tests.megatron.model_helpers import PackedBatch, packed_batch
from tests.mindspeed_llm.gradients import hf_gradients
from tests.mindspeed_llm.tiny import (
    tiny_hf_config,
    tiny_moonlight_config,
    tiny_qwen3_config,
    tiny_v2_lite_config,
    write_tiny_checkpoint,
)
from tests.parallel.launcher import run_ranks

LENGTHS = [24, 40, 8, 32]
VPP = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
CASES: dict[str, tuple[dict[str, Any], ParallelLayout, dict[str, Any]]] = {
    "moonlight, tp2 cp2, experts over all": (
        tiny_moonlight_config(),
        ParallelLayout(4, 2, context_parallel_size=2, expert_model_parallel_size=4),
        {},
    ),
    "deepseek-v3, chunks with a no-op slot, ep2, frozen router": (
        tiny_hf_config(),
        ParallelLayout(4, **VPP, expert_model_parallel_size=2, noop_layers=(3,)),
        {"freeze_moe_router": True},
    ),
    "deepseek-v3, tp2 pp2, down-projections split, frozen router": (
        tiny_hf_config(),
        ParallelLayout(4, 2, 2, num_layer_list=(2, 1), mla_down_proj_column_parallel=True),
        {"freeze_moe_router": True},
    ),
    "deepseek-v2-lite, tp2 etp2 ep2": (
        tiny_v2_lite_config(),
        ParallelLayout(4, 2, expert_model_parallel_size=2, expert_tensor_parallel_size=2),
        {},
    ),
    "qwen3 tied, tp2 pp2": (
        tiny_qwen3_config(tie_word_embeddings=True),
        ParallelLayout(4, 2, 2, num_layer_list=(2, 1)),
        {},
    ),
    "qwen3, cp2 dp2": (tiny_qwen3_config(), ParallelLayout(4, context_parallel_size=2), {}),
}


def gradients(
    path: str, layout: ParallelLayout, changes: dict[str, Any], batch: PackedBatch
) -> dict[str, torch.Tensor]:
    """Load, run one sequence per micro-batch through the schedule, reduce; on every rank all gradients."""
    groups = initialize_from_layout(layout)
    hf = load_hf_config(path)
    fields = {"calculate_per_token_loss": True, **changes}
    if hf.has_expert_bias:
        fields["moe_router_bias_update_rate"] = 0.0
    model = build_model(hf, groups, reference_ops(), params_dtype=torch.float32, **fields)
    load_weights(model, local_plan(hf, layout, groups.rank), HFCheckpoint(path))
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(bucket_size=5000), model, groups)
    own = [_shard(batch, index, groups) for index in range(groups.coords.dp, len(LENGTHS), layout.data_parallel_size)]

    def forward_step(rest: Iterator[PackedBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        part = next(rest)

        def loss_func(logits_TV: torch.Tensor) -> tuple[torch.Tensor, None]:
            return vocab_parallel_cross_entropy(logits_TV, part.labels_T, groups.tp, reference_ops()).sum() / sum(
                LENGTHS
            ), None

        return model(part.ids_T, part.positions_T, part.params), loss_func

    get_forward_backward_func(groups)(
        forward_step_func=forward_step,
        data_iterator=iter(own),
        model=ddp,
        tensor_shapes=[(len(part.ids_T) // groups.tp.size(), hf.hidden_size) for part in own],
    )
    finalize_model_grads(ddp, groups)
    found = hf_gradients(ddp, hf, groups)
    destroy_model_parallel()
    return found


def _shard(batch: PackedBatch, index: int, groups: ProcessGroups) -> PackedBatch:
    """One sequence as a micro-batch of its own, this context-parallel rank's tokens of it."""
    start, stop = batch.params.cu_seqlens[index : index + 2].tolist()
    bounds = torch.tensor([0, stop - start], dtype=torch.int32)
    mine = zigzag_indices(bounds, groups.cp.size(), groups.cp.rank())
    tensors = (tensor[start:stop][mine] for tensor in (batch.ids_T, batch.positions_T, batch.labels_T))
    return PackedBatch(*tensors, PackedSeqParams(bounds, stop - start))


def all_gradients(paths: dict[str, str], batch: PackedBatch) -> dict[str, dict[str, torch.Tensor]]:
    return {name: gradients(path, *CASES[name][1:], batch) for name, path in paths.items()}


# Uneven stages with TP are in "qwen3 tied", CP in "moonlight"; tests/parallel/test_layout_table.py splits the
# down-projections, test_training_parity.py has qwen3 in one process.
REPEATED = {"deepseek-v3, tp2 pp2, down-projections split, frozen router", "qwen3, cp2 dp2"}


@pytest.mark.parametrize("names", [CASES.keys() - REPEATED, pytest.param(REPEATED, marks=pytest.mark.slow)])
def test_gradients_of_four_ranks_equal_transformers(names: set[str], tmp_path: Path) -> None:
    from tests.mindspeed_llm.transformers_side import Theirs, largest_difference  # ranks need no transformers

    paths = {name: str(tmp_path / str(number)) for number, name in enumerate(sorted(names))}
    for name, path in paths.items():
        write_tiny_checkpoint(path, CASES[name][0], seed=5)
    batch = packed_batch(LENGTHS, 128, seed=1)
    by_rank = run_ranks(all_gradients, 4, paths, batch, timeout_s=180)
    for name, path in paths.items():
        _, expected = Theirs(Path(path)).gradients(batch)
        if CASES[name][2].get("freeze_moe_router"):
            expected = {key: grad for key, grad in expected.items() if not key.endswith("mlp.gate.weight")}
        for found in (of_rank[name] for of_rank in by_rank):
            assert found.keys() == expected.keys()
            worst = largest_difference(found, expected)
            assert worst[0] < 1e-5, (name, worst)
