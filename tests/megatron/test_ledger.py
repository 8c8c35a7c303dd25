"""The memory ledger beside the allocator's own reports: predicted and real, between steps and between passes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.memory_ledger import LedgerEntry, ledger, table, total_bytes
from megatron.core.models.gpt.gpt_model import make_gpt_model
from megatron.core.ops import reference_ops
from megatron.core.optimizer import DistributedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import ProcessGroups
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from tests.megatron.allocator_bytes import net_allocated
from tests.megatron.ledger_oracles import activation_ledger, planned_groups, predict_ledger
from tests.megatron.model_helpers import packed_batch
from tests.parallel.layout_table import CASES, MODELS, Case

TOLERANCE = 0.02
DDP = DistributedDataParallelConfig()
PLAIN = OptimizerConfig()
HALF_ON_HOST = OptimizerConfig(
    adam_beta2=0.98,
    use_precision_aware_optimizer=True,
    exp_avg_dtype=torch.bfloat16,
    exp_avg_sq_dtype=torch.bfloat16,
    optimizer_cpu_offload=True,
    optimizer_offload_fraction=0.5,
)
Engine = tuple[DistributedDataParallel, DistributedOptimizer]


def _config(case: Case) -> TransformerConfig:
    return replace(MODELS[case.model], sequence_parallel=case.layout.tensor_model_parallel_size > 1, **case.changes)


def _engine(
    config: TransformerConfig, groups: ProcessGroups, optimizer_config: OptimizerConfig = PLAIN, seed: int | None = None
) -> Engine:
    model = make_gpt_model(config, groups, reference_ops())
    if seed is not None:
        model.init_weights(seed)
    ddp = DistributedDataParallel(config, DDP, model, groups)
    return ddp, get_megatron_optimizer(optimizer_config, ddp, groups, reference_ops())


@pytest.mark.parametrize(
    "cases",
    [
        [case for index, case in enumerate(CASES) if index % 6 == 0 or "no-op" in case.name],
        pytest.param(CASES, marks=pytest.mark.slow),
    ],
    ids=["a sixth", "all"],
)
def test_layouts_of_the_table_are_predicted_to_the_byte(cases: list[Case]) -> None:
    # Of every other layout the first rank, of the rest the last.
    places = [(case, (index % 2) * (case.layout.world_size - 1)) for index, case in enumerate(cases)]
    predicted = [predict_ledger(_config(case), case.layout, rank, DDP, PLAIN) for case, rank in places]
    made = net_allocated(*(partial(_engine, _config(case), planned_groups(case.layout, rank)) for case, rank in places))
    for (case, _), want, (engine, measured) in zip(places, predicted, made, strict=True):
        assert ledger(*engine) == want, case.name
        assert measured == pytest.approx(total_bytes(want), rel=TOLERANCE), case.name


@pytest.mark.parametrize("optimizer_config", [PLAIN, HALF_ON_HOST], ids=["plain", "half_on_host"])
def test_steps_leave_nothing_behind(one_rank: ProcessGroups, optimizer_config: OptimizerConfig) -> None:
    config = replace(MODELS["deepseek_v3"], num_layers=2, moe_layer_freq=(0, 1))
    batch = packed_batch([16, 16], config.vocab_size)

    def train() -> Engine:
        ddp, optimizer = _engine(config, one_rank, optimizer_config, seed=0)
        for _ in range(2):
            optimizer.zero_grad()
            ddp(batch.ids_T, batch.positions_T, batch.params, batch.labels_T).sum().backward()
            finalize_model_grads(ddp, one_rank)
            assert optimizer.step()[0]
        return ddp, optimizer

    [(engine, measured)] = net_allocated(train)
    assert ledger(*engine) == predict_ledger(config, ParallelLayout(), 0, DDP, optimizer_config)
    assert measured == pytest.approx(total_bytes(ledger(*engine)), rel=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_offload_and_cpu_adam_free_what_the_ledger_says(one_rank: ProcessGroups, dtype: torch.dtype) -> None:
    """On this machine device and host are the same memory: what moves stays, and what is dropped goes."""
    config = replace(MODELS["deepseek_v3"], params_dtype=dtype)
    engines: list[Engine] = []

    def make() -> list[LedgerEntry]:
        engines.append(_engine(config, one_rank))
        return ledger(*engines[0])

    def leave() -> list[LedgerEntry]:
        (ddp, optimizer), *_ = engines
        ddp.offload_params()
        ddp.offload_grads()
        optimizer.offload()
        return ledger(ddp, optimizer)

    def come_back() -> list[LedgerEntry]:
        (ddp, optimizer), *_ = engines
        ddp.onload_params()
        ddp.onload_grads()
        optimizer.onload()
        return ledger(ddp, optimizer)

    (before, made), (left, freed), (back, taken) = net_allocated(make, leave, come_back)
    kinds = ("parameter", "gradient", "master", "exp_avg", "exp_avg_sq")
    sizes = {what: total_bytes(before, "device", what) for what in kinds}
    size = sizes["exp_avg"]
    if dtype == torch.float32:  # the parameters are their own master weights
        assert sizes == dict.fromkeys(kinds, size) | {"master": 0}
    else:
        assert sizes == dict.fromkeys(kinds, size) | {"parameter": size // 2}
    assert made == pytest.approx(total_bytes(before), rel=TOLERANCE)
    assert total_bytes(before, "host") == 0
    assert {entry.what for entry in left if entry.device == "device"} == {"buffer"}
    assert total_bytes(left, "host") == sum(sizes.values()) - sizes["gradient"]
    assert freed == -sizes["gradient"]
    assert back == before
    assert taken == sizes["gradient"]

    hosted = ledger(*_engine(config, one_rank, replace(PLAIN, optimizer_cpu_offload=True)))
    assert total_bytes(hosted, "device") == total_bytes(before) - sum(sizes[what] for what in kinds[2:])
    assert total_bytes(hosted, "host", "master") == size
    assert "decoder.layers.7.mlp.experts.weight1" in {entry.owner for entry in before}
    assert f"{total_bytes(hosted):>16,} in all" in table(hosted)


_RECOMPUTE: list[dict[str, Any]] = [
    {},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "moe_act", "layernorm", "mlp")},
    {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
]


def test_recompute_frees_what_the_ledger_says(one_rank: ProcessGroups) -> None:
    held = []
    for changes in _RECOMPUTE:
        config = replace(MODELS["deepseek_v3"], **changes)
        model = make_gpt_model(config, one_rank, reference_ops())
        model.init_weights(0)
        batch = packed_batch([64, 64], config.vocab_size)

        def forward(model: Any = model, batch: Any = batch) -> torch.Tensor:
            return model(batch.ids_T, batch.positions_T, batch.params, batch.labels_T).sum()

        forward()
        [((_loss, entries), measured)] = net_allocated(
            lambda forward=forward, model=model: activation_ledger(model, forward)
        )
        assert total_bytes(entries) == pytest.approx(measured, rel=TOLERANCE)
        held.append(measured)
    assert held[1] < held[0] / 10
    assert max(held[2:]) < 0.8 * held[0]


def test_a_stage_of_671b_is_planned_on_a_laptop() -> None:
    """TP4 PP8 EP8 over 256 dies: 6.3 GiB of weights, 12.6 of gradients, 32.3 of state, which CPU Adam takes away."""
    config = MLATransformerConfig(
        num_layers=61,
        hidden_size=7168,
        num_attention_heads=128,
        ffn_hidden_size=18432,
        vocab_size=129280,
        params_dtype=torch.bfloat16,
        sequence_parallel=True,
        num_moe_experts=256,
        moe_ffn_hidden_size=2048,
        moe_shared_expert_intermediate_size=2048,
        moe_layer_freq=[0] * 3 + [1] * 58,
        moe_router_topk=8,
        moe_router_num_groups=8,
        moe_router_group_topk=4,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_head_dim=128,
        qk_pos_emb_head_dim=64,
        v_head_dim=128,
    )
    layout = ParallelLayout(
        world_size=256,
        tensor_model_parallel_size=4,
        pipeline_model_parallel_size=8,
        expert_model_parallel_size=32,
        num_layer_list=(7, 7, 8, 8, 8, 8, 8, 7),
    )
    entries = predict_ledger(config, layout, 3 * 32, DDP, PLAIN)
    gib = {what: total_bytes(entries, "device", what) / 2**30 for what in ("parameter", "gradient", "master")}
    assert gib == pytest.approx({"parameter": 6.31, "gradient": 12.62, "master": 10.77}, abs=0.01)
    hosted = predict_ledger(config, layout, 3 * 32, DDP, replace(PLAIN, optimizer_cpu_offload=True))
    assert total_bytes(hosted, "device") == pytest.approx((gib["parameter"] + gib["gradient"]) * 2**30, rel=1e-3)
