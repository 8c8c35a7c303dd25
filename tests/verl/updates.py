"""One policy update on fixed rows, in any layout, for tests: log-probs, metrics and gradients under HF names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hf_formats.config import HFModelConfig, parse_hf_config
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import model_chunks
from megatron.core.ops import TrainOps, reference_ops
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import ProcessGroups, destroy_model_parallel, initialize_from_layout
from mindspeed_llm.model import build_model
from tests.mindspeed_llm.gradients import hf_gradients
from tests.mindspeed_llm.tiny import tiny_hf_config
from verl.protocol import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionSection
from verl.utils.partitions import balanced_order
from verl.workers.actor import MegatronPPOActor
from verl.workers.config import ActorConfig

PROMPT, RESPONSE = 12, 40


@dataclass(frozen=True)
class Update:
    """What is updated and how.

    Attributes:
        model: fields of the engine's TransformerConfig.
        actor: fields of ActorConfig; micro-batches of rows, unless they say otherwise.
        num_mtp: multi-token-prediction modules of the model.
        correction: between rollout and training.
        samples: rows of each prompt.
        begins_anew: samples go on in new rows twice, as several turns may.
        optimizer: fields of OptimizerConfig; by default it leaves the weights where they are.
        gate_noise: how far routers move between the old log-prob pass and the update, as an optimizer would move them.
    """

    layout: ParallelLayout = field(default_factory=ParallelLayout)
    model: dict[str, Any] = field(default_factory=dict)
    actor: dict[str, Any] = field(default_factory=dict)
    num_rows: int = 16
    num_mtp: int = 0
    correction: RolloutCorrectionSection = field(default_factory=RolloutCorrectionSection)
    gate_noise: float = 0.0
    samples: int = 1
    begins_anew: bool = False
    optimizer: dict[str, Any] = field(default_factory=dict)


@dataclass
class Updated:
    """Log-probs [B, R] in the order of ``some_rows``, metrics, HF name -> gradient, global layer -> expert bias.

    packed: of each data-parallel rank's micro-batches of the update, the rows in the batch's order, and the tokens.
    """

    log_probs: torch.Tensor
    metrics: dict[str, float]
    gradients: dict[str, torch.Tensor]
    biases: dict[int, torch.Tensor]
    packed: list[list[tuple[list[int], int]]]


def some_rows(num_rows: int, samples: int = 1) -> DataProto:
    """Rows of 4 to 52 tokens; advantages, old and reference log-probs as after a few updates."""
    generator = torch.Generator().manual_seed(1)
    prompt_of_row = torch.arange(num_rows) // samples * samples
    prompts = torch.randint(2, PROMPT + 1, (num_rows, 1), generator=generator)[prompt_of_row]
    responses = torch.randint(1, RESPONSE + 1, (num_rows, 1), generator=generator)
    mask = torch.cat([torch.arange(PROMPT) >= PROMPT - prompts, torch.arange(RESPONSE) < responses], dim=1).long()
    response_mask = mask[:, PROMPT:]
    noise = torch.rand(2, num_rows, RESPONSE, generator=generator)
    input_ids = torch.randint(2, 128, mask.shape, generator=generator)
    input_ids[:, :PROMPT] = input_ids[prompt_of_row, :PROMPT]
    tensors = {
        "input_ids": input_ids * mask,
        "attention_mask": mask,
        "response_mask": response_mask,
        "advantages": torch.randn(num_rows, 1, generator=generator) * response_mask,
        "old_log_probs": -4.8 - 0.3 * noise[0],
        "ref_log_prob": -4.8 - 0.3 * noise[1],
    }
    drift = (
        torch.rand(num_rows, RESPONSE, generator=generator) - 0.5 + 0.1 * torch.randn(num_rows, 1, generator=generator)
    )
    tensors["rollout_log_probs"] = tensors["old_log_probs"] + 0.2 * drift
    return DataProto.from_dict(tensors, meta_info={"temperature": 0.9, "rollout_n": 1, "global_step": 1})


def begin_anew(data: DataProto) -> None:
    """Responses of 6 tokens and more begin two new rows, the first of which begins with a third of what was there."""
    lengths = data.batch["response_mask"].sum(-1)
    starts = torch.zeros_like(data.batch["response_mask"])
    for row, length in enumerate(lengths.tolist()):
        if length >= 6:
            first, second = length // 3, 2 * length // 3
            num_prompt = int(data.batch["attention_mask"][row, :PROMPT].sum())
            starts[row, first], starts[row, second] = 1 + num_prompt + first // 3, 1 + num_prompt - 1
            data.batch["response_mask"][row, [first, second]] = 0  # given
    data.batch["row_starts"] = starts
    for name in ("advantages", "old_log_probs", "ref_log_prob", "rollout_log_probs"):
        data.batch[name] = data.batch[name] * data.batch["response_mask"]


def some_choices(data: DataProto, hf: HFModelConfig) -> torch.Tensor:
    """Experts of every token but the last of each row, as a rollout might have chosen them: uint8 [B, L, M, K]."""
    generator = torch.Generator().manual_seed(2)
    num_moe = sum(hf.is_moe_layer(layer) for layer in range(hf.num_hidden_layers))
    ranks = torch.rand(*data.batch["input_ids"].shape, num_moe, hf.n_routed_experts, generator=generator)
    return ranks.argsort(-1)[..., : hf.num_experts_per_tok].to(torch.uint8)


def update(case: Update, device: str = "cpu", ops: TrainOps | None = None) -> Updated | None:
    """Runs on every rank; the result is on the first one, on the CPU, None elsewhere."""
    groups = initialize_from_layout(case.layout)
    try:
        return _update(case, groups, device, ops)
    finally:
        destroy_model_parallel()


def updates(cases: dict[str, Update]) -> dict[str, Updated | None]:
    """Several layouts of one world, one after another."""
    return {name: update(case) for name, case in cases.items()}


def make_actor(
    case: Update, groups: ProcessGroups, device: str = "cpu", ops: TrainOps | None = None
) -> tuple[HFModelConfig, DistributedDataParallel, MegatronPPOActor]:
    """The model with random weights, the same in every layout, and its optimizer."""
    given = tiny_hf_config(num_hidden_layers=4, num_nextn_predict_layers=1, initializer_range=0.1)
    hf = parse_hf_config(given, source="tests").with_mtp(case.num_mtp)
    fields = {"calculate_per_token_loss": True, "params_dtype": torch.float32} | case.model
    ops = ops or reference_ops()
    model = build_model(hf, groups, ops, **fields)
    model.init_weights(7)
    model = model.to(device)
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(bucket_size=10_000), model, groups)
    settings = OptimizerConfig(**({"lr": 0.0, "clip_grad": 0.0} | case.optimizer))
    optimizer = get_megatron_optimizer(settings, ddp, groups, ops)
    config = ActorConfig(
        **(
            {
                "ppo_mini_batch_size": case.num_rows,
                "ppo_micro_batch_size_per_gpu": 4,
                "use_kl_loss": True,
                "kl_loss_coef": 0.1,
                "entropy_coeff": 0.01,
                "share_prompts": "auto" if case.samples > 1 else "false",
            }
            | case.actor
        )
    )
    return hf, ddp, MegatronPPOActor(config, model.config, groups, ops, ddp, optimizer, None, case.correction)


def _update(case: Update, groups: ProcessGroups, device: str, ops: TrainOps | None) -> Updated | None:
    hf, ddp, actor = make_actor(case, groups, device, ops)
    config = actor.config
    data, num_ranks = some_rows(case.num_rows, case.samples), groups.dp.size()
    if case.begins_anew:
        begin_anew(data)
    if config.takes_rollout_routing:
        data.batch["routed_experts"] = some_choices(data, hf)
    lengths, prompts = data.batch["attention_mask"].sum(-1), data.batch["attention_mask"][:, :PROMPT].sum(-1)
    groups_of = {"group_size": case.samples if actor.shares_prompts else 1, "prompt_lengths": prompts.tolist()}
    order = torch.tensor(balanced_order(lengths.tolist(), num_ranks, case.num_rows, **groups_of))
    data.reorder(order)
    packed: list[tuple[list[int], int]] = []
    first = groups.coords.dp * case.num_rows // num_ranks
    run = actor.forward_backward_batch

    def recorded(*args: Any, **given: Any) -> Any:
        outputs, micro_batches = run(*args, **given)
        rows = [order[first + micro.token_rows_N.unique()].tolist() for micro in micro_batches]
        packed[:] = zip(rows, [micro.num_tokens for micro in micro_batches], strict=True)
        return outputs, micro_batches

    actor.forward_backward_batch = recorded  # type: ignore[method-assign]
    mine = data.chunk(num_ranks)[groups.coords.dp]
    log_probs = actor.compute_log_prob(
        mine,
        micro_batch_size=config.ppo_micro_batch_size_per_gpu,
        max_token_len=2 * config.ppo_max_token_len_per_gpu if config.use_dynamic_bsz else None,  # packed in another way
    )
    move_gates(ddp.module, case.gate_noise)
    metrics = actor.update_policy(mine)
    gradients = {name: gradient.cpu() for name, gradient in hf_gradients(ddp, hf, groups).items()}
    log_probs = None if log_probs is None else log_probs.cpu()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (groups.coords, log_probs, metrics, _biases(ddp.module), packed))
    if dist.get_rank() != 0:
        return None
    last = groups.layout.pipeline_model_parallel_size - 1
    ends = sorted(
        (entry for entry in gathered if (entry[0].pp, entry[0].tp, entry[0].cp) == (last, 0, 0)), key=lambda e: e[0].dp
    )
    rows = torch.empty_like(some_rows(case.num_rows).batch["old_log_probs"])
    rows[order] = torch.cat([entry[1] for entry in ends])
    biases = {layer: bias for entry in gathered for layer, bias in entry[3].items()}
    return Updated(rows, ends[0][2], gradients, biases, [entry[4] for entry in ends])


def _routers(model: torch.nn.Module) -> list[Any]:
    return [
        layer.mlp.router
        for chunk in model_chunks(model)
        for layer in chunk.decoder.layers  # type: ignore[union-attr]
        if hasattr(layer.mlp, "router")
    ]


@torch.no_grad()
def move_gates(model: torch.nn.Module, noise: float) -> None:
    for router in _routers(model):
        generator = torch.Generator().manual_seed(router.global_layer)
        router.weight += noise * torch.randn(router.weight.shape, generator=generator).to(router.weight)


def _biases(model: torch.nn.Module) -> dict[int, torch.Tensor]:
    return {router.global_layer: router.expert_bias.cpu().clone() for router in _routers(model)}
