"""Scoring and updating the policy with the Megatron engine, on packed micro-batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from megatron.core.distributed import DistributedDataParallel, NonFiniteGradientError, finalize_model_grads
from megatron.core.models.gpt import GPTModel, ModelChunks
from megatron.core.ops import TrainOps
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.parallel_state import ProcessGroups
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.cross_entropy import (
    vocab_parallel_cross_entropy,
    vocab_parallel_cross_entropy_and_entropy,
    vocab_parallel_entropy,
)
from megatron.core.transformer.moe.aux_loss import collect_moe_aux_losses, set_aux_loss_scale
from megatron.core.transformer.moe.expert_load import collect_expert_loads
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock, collect_mtp_losses
from megatron.core.transformer.transformer_config import TransformerConfig
from verl.protocol import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionSection
from verl.trainer.ppo.rollout_correction import LossCorrection, corrected
from verl.utils.megatron.packed_batch import PackedMicroBatch, pack_micro_batch, row_tokens, scatter_to_rows
from verl.utils.megatron.reduce import reduce_over
from verl.utils.partitions import RowTokens, split_to, units_of_rows
from verl.workers.actor.loss_inputs import LossInputs
from verl.workers.actor.policy_loss import PolicyLoss
from verl.workers.actor.routing import RolloutRouting, Routing, TracedRouting
from verl.workers.actor.update_metrics import MicroReport, UpdateMetrics
from verl.workers.config import ActorConfig

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
LossFunc = Callable[[Tensor, PackedMicroBatch], tuple[Tensor, Any]]  # -> (loss, what it reports)


class MegatronPPOActor:
    """The policy of one rank: a stage of the model, its optimizer, and how batches run through them.

    Every rank of a data-parallel replica gets the same rows, on the host; results live on the last pipeline stage.
    ``device_type`` (cpu, cuda or npu) says whose ops they are, by default those of the weights' device.
    """

    def __init__(
        self,
        config: ActorConfig,
        tf_config: TransformerConfig,
        groups: ProcessGroups,
        ops: TrainOps,
        actor_module: DistributedDataParallel | GPTModel | ModelChunks,
        actor_optimizer: DistributedOptimizer | None = None,
        scheduler: OptimizerParamScheduler | None = None,
        rollout_correction: RolloutCorrectionSection | None = None,
        device_type: str | None = None,
    ) -> None:
        self.rollout_correction = rollout_correction or RolloutCorrectionSection()
        if self.rollout_correction.is_reinforce:  # the policy gradient, which is the loss gpg
            config = replace(config, policy_loss=replace(config.policy_loss, loss_mode="gpg"))
        self.config = config
        self.tf_config = tf_config
        self.groups = groups
        self.ops = ops
        self.actor_module = actor_module
        self.actor_optimizer = actor_optimizer
        self.scheduler = scheduler
        self.shares_prompts = not config.skip_sharing_reason(device_type or self.device.type)
        self._forward_backward = get_forward_backward_func(groups)
        self._all_moe_layers = [layer for layer in range(tf_config.num_layers) if tf_config.is_moe_layer(layer)]
        self.routing = self._new_routing()

    @property
    def device(self) -> torch.device:
        return next(self.actor_module.parameters()).device

    @property
    def is_last_stage(self) -> bool:
        return self.groups.coords.pp == self.groups.pp.size() - 1

    @property
    def scored_columns(self) -> tuple[str, ...]:
        """The columns that ``compute_log_prob`` reads on this stage."""
        return ("input_ids", "attention_mask", "response_mask", "row_starts", *self.routing.columns)

    @property
    def trained_columns(self) -> tuple[str, ...]:
        """The columns that ``update_policy`` reads on this stage if the batch has them, without the advantages."""
        of_loss = ("old_log_probs", "ref_log_prob", "rollout_log_probs") if self.is_last_stage else ()
        return (*self.scored_columns, *of_loss)

    @property
    def moe_layers(self) -> tuple[list[int], int]:
        """The MoE layers of this stage, as indices into those of the model, and how many the model has."""
        return [self._all_moe_layers.index(layer) for layer in self._moe_layers()], len(self._all_moe_layers)

    @torch.no_grad()
    def compute_log_prob(
        self, data: DataProto, *, micro_batch_size: int | None = None, max_token_len: int | None = None
    ) -> Tensor | None:
        """Log-probabilities of the response tokens at ``meta_info["temperature"]``; collective over a replica.

        ``max_token_len`` counts the tokens of one rank: with context parallelism a micro-batch has CP times as many.

        Returns:
            fp32 [B, R] on the host on the last pipeline stage, None elsewhere.
        """
        temperature = float(data.meta_info["temperature"])

        def score(logits_SV: Tensor, micro: PackedMicroBatch) -> tuple[Tensor, Tensor]:
            log_probs_S = self._log_probs(scaled(logits_SV, temperature), micro)
            return log_probs_S.new_zeros(()), log_probs_S

        self.actor_module.eval()
        data = self.routing.begin_scoring(data)
        log_probs_S, micro_batches = self.forward_backward_batch(
            data, score, forward_only=True, micro_batch_size=micro_batch_size, max_token_len=max_token_len
        )
        self.routing.end_scoring(data, micro_batches)
        if not self.is_last_stage:
            return None
        log_probs_BR = scatter_to_rows(log_probs_S, micro_batches, data.batch["response_mask"].shape)
        # With context parallelism each token was scored by one rank, and is zero on the others.
        return reduce_over(log_probs_BR, self.groups.cp, dist.ReduceOp.SUM, self.device)

    def update_policy(self, data: DataProto) -> dict[str, float]:
        """``ppo_epochs`` passes over the mini-batches of ``data``; metrics are global on the last stage, else empty."""
        assert self.actor_optimizer is not None, "update_policy needs an optimizer"
        self.actor_module.train()
        metrics = UpdateMetrics(self.groups, self.device)
        data = self.routing.begin_update(data)
        corrections: dict[str, float] = {}
        if self.is_last_stage and self.rollout_correction.is_on:
            found, corrections = corrected(data, self.rollout_correction, self.groups, self.device)
            data = data if self.rollout_correction.bypass_mode else found
        correction = LossCorrection.of(self.rollout_correction, corrections)
        for mini_batch in self.make_minibatch_iterator(data):
            self._update_minibatch(mini_batch, metrics, correction)
        if self.scheduler is not None:
            self.scheduler.step(1)  # one per training step, as upstream, however many mini-batches it has
        self.routing.end_update()
        counted = model_metrics(self.actor_module, self.tf_config, self.groups)
        return corrections | metrics.result() | counted if self.is_last_stage else {}

    def _new_routing(self) -> Routing:
        """Replay is for what is trained: without an optimizer, or without experts, the gate chooses."""
        num_experts = self.tf_config.num_moe_experts
        if not self.config.replays_routing or self.actor_optimizer is None or num_experts is None:
            return Routing()
        replay = RouterReplay(num_experts, self.groups)
        if self.config.takes_rollout_routing:
            return RolloutRouting(replay, self._moe_layers(), self._all_moe_layers)
        return TracedRouting(replay, self.groups, self.device)

    def _moe_layers(self) -> list[int]:
        """The global numbers of this stage's MoE layers, without those of MTP modules."""
        routers = (module for module in self.actor_module.modules() if isinstance(module, TopKRouter))
        return sorted(r.global_layer for r in routers if r.global_layer < self.tf_config.num_layers)

    def make_minibatch_iterator(self, data: DataProto) -> Iterator[DataProto]:
        """This rank's rows in mini-batches of ``ppo_mini_batch_size`` prompts (times n over data-parallel ranks).

        The trainer's balanced order decides, for all ranks together, which rows a mini-batch has. ``shuffle`` changes
        the order of the mini-batches in each epoch.
        """
        rollout_n = int(data.meta_info["rollout_n"])
        rows = self.config.ppo_mini_batch_size * rollout_n // self.groups.dp.size()
        starts = range(0, len(data), rows)
        for epoch in range(self.config.ppo_epochs):
            order = torch.arange(len(starts))
            if self.config.shuffle:
                seed = self.config.shuffle_seed(int(data.meta_info["global_step"]), epoch)
                order = torch.randperm(len(starts), generator=torch.Generator().manual_seed(seed))
            for index in order.tolist():
                yield data.select_idxs(torch.arange(starts[index], min(starts[index] + rows, len(data))))

    def _update_minibatch(self, data: DataProto, metrics: UpdateMetrics, correction: LossCorrection | None) -> None:
        assert self.actor_optimizer is not None
        given, bypass = (data, self.config, self.groups, self.device), self.rollout_correction.bypass_mode
        inputs = LossInputs.from_batch(*given, anchors_on_rollout=bypass, correction=correction)
        loss_of = PolicyLoss(self.config, inputs, self.groups.cp if self.groups.cp.size() > 1 else None)
        set_auxiliary_scales(self.actor_module, inputs.num_tokens, inputs.num_response_tokens)
        temperature = float(data.meta_info["temperature"])

        losses: list[Tensor] = []

        def policy_loss(logits_SV: Tensor, micro: PackedMicroBatch) -> tuple[Tensor, MicroReport]:
            logits_SV = scaled(logits_SV, temperature)
            if self.config.entropy_coeff == 0:
                losses_S, entropy_S = vocab_parallel_cross_entropy_and_entropy(
                    logits_SV, micro.labels_S, self.groups.tp, self.ops
                )
                log_probs_S = -losses_S
            else:
                log_probs_S = self._log_probs(logits_SV, micro)
                entropy_S = vocab_parallel_entropy(logits_SV, self.groups.tp, self.ops)
            loss, report = loss_of(log_probs_S, entropy_S, micro)
            losses.append(loss.detach())
            return loss, report

        self.actor_optimizer.zero_grad()
        with record_function("forward_backward"):
            reports, _ = self.forward_backward_batch(
                data,
                policy_loss,
                forward_only=False,
                micro_batch_size=self.config.ppo_micro_batch_size_per_gpu,
                max_token_len=self.config.ppo_max_token_len_per_gpu if self.config.use_dynamic_bsz else None,
            )
        assert isinstance(self.actor_module, DistributedDataParallel)
        with record_function("optimizer_step"):
            finalize_model_grads(self.actor_module, self.groups)
            has_stepped, grad_norm = self._optimizer_step(losses, data)
        metrics.add(reports, grad_norm, self.actor_optimizer.param_groups[0]["lr"], has_stepped)

    def _optimizer_step(self, losses: list[Tensor], data: DataProto) -> tuple[bool, float]:
        """Return whether the parameters were updated, and the gradient norm; an error says which training step it is.

        ``losses`` are those of this stage's micro-batches, none but on the last stage.
        """
        assert self.actor_optimizer is not None
        try:
            has_stepped, grad_norm, _ = self.actor_optimizer.step(torch.stack(losses).sum() if losses else None)
        except NonFiniteGradientError as error:
            raise NonFiniteGradientError(f"training step {data.meta_info.get('global_step')}: {error}") from error
        return has_stepped, grad_norm

    def forward_backward_batch(
        self,
        data: DataProto,
        loss_func: LossFunc,
        *,
        forward_only: bool,
        micro_batch_size: int | None,
        max_token_len: int | None,
    ) -> tuple[list[Any], list[PackedMicroBatch]]:
        """Runs all rows of ``data`` through the pipeline; gradients are the plain sum of the micro-batch losses.

        Returns:
            loss_func's reports (last stage; empty elsewhere) and the micro-batches they belong to, in the same order.
        """
        batch, layout = data.batch, self.groups.layout
        cp = layout.context_parallel_size
        given = batch["input_ids"], batch["attention_mask"], batch["response_mask"]
        starts_BR = batch.get("row_starts", None)
        chunks = split_rows(
            row_tokens(*given, cp, shares_prompts=self.shares_prompts, row_starts_BR=starts_BR),
            micro_batch_size=micro_batch_size or len(data),
            max_token_len=None if max_token_len is None else max_token_len * cp,
            dp_group=self.groups.dp,
            device=self.device,
        )
        micro_batches = [
            pack_micro_batch(
                *given,
                rows,
                layout.tensor_model_parallel_size,
                cp,
                self.groups.coords.cp,
                shares_prompts=self.shares_prompts,
                row_starts_BR=starts_BR,
            ).to(self.device)
            for rows in chunks
        ]
        micro_batches = [micro.with_routing(self.routing.of_micro_batch(micro, data)) for micro in micro_batches]
        outputs = self._run_pipeline(micro_batches, loss_func, forward_only)
        return outputs, micro_batches

    def _run_pipeline(
        self, micro_batches: Sequence[PackedMicroBatch], loss_func: LossFunc, forward_only: bool
    ) -> list[Any]:
        has_mtp = self.tf_config.trains_mtp and not forward_only

        def forward_step(iterator: Iterator[PackedMicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable]:
            micro = next(iterator)
            loss_mask_W = micro.loss_mask_W if has_mtp else None
            output = model(
                micro.input_ids_T,
                micro.position_ids_T,
                micro.packed_seq_params,
                loss_mask_W=loss_mask_W,
                scored_S=micro.positions_S,
            )
            return output, lambda logits_SV: loss_func(logits_SV, micro)

        tp, hidden = self.groups.tp.size(), self.tf_config.hidden_size
        return self._forward_backward(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=self.actor_module,
            forward_only=forward_only,
            tensor_shapes=[(micro.num_tokens // tp, hidden) for micro in micro_batches],
        )

    def _log_probs(self, logits_SV: Tensor, micro: PackedMicroBatch) -> Tensor:
        return -vocab_parallel_cross_entropy(logits_SV, micro.labels_S, self.groups.tp, self.ops)


def scaled(logits_SV: Tensor, temperature: float) -> Tensor:
    """The policy that acted is softmax(logits / T); training must score that one (upstream leaves T out)."""
    return logits_SV if temperature == 1.0 else logits_SV / temperature


def split_rows(
    tokens: RowTokens,
    *,
    micro_batch_size: int,
    max_token_len: int | None,
    dp_group: dist.ProcessGroup,
    device: torch.device = CPU,
) -> list[list[int]]:
    """Row indices of each micro-batch, largest first, so that the i-th ones of all ranks have similar sizes.

    Args:
        tokens: packed tokens of the rows; those that share a prompt stay together as far as the sizes allow.
        micro_batch_size: rows in a micro-batch when ``max_token_len`` is None.
        max_token_len: packed tokens a micro-batch may have; a longer row gets one of its own.
        dp_group: every rank of it gets the same number of micro-batches, because experts are shared across it. A rank
            with fewer rows gets empty ones at the end.
        device: where the collectives of ``dp_group`` expect tensors.
    """
    units, parts = units_of_rows(tokens, micro_batch_size, max_token_len)
    wanted = int(reduce_over(torch.tensor([len(parts)], dtype=torch.int32), dp_group, dist.ReduceOp.MAX, device))
    if max_token_len is not None:
        parts = split_to(parts, [tokens.of(unit) for unit in units], wanted)
    chunks = [sorted(row for index in part for row in units[index]) for part in parts]
    if max_token_len is not None:  # prompts are split last
        chunks = split_to(chunks, [tokens.of([row]) for row in range(len(tokens.own))], wanted)
    chunks.sort(key=lambda chunk: (-tokens.of(chunk), chunk))
    return chunks + [[] for _ in range(wanted - len(chunks))]


def set_auxiliary_scales(model: torch.nn.Module, num_tokens: float, num_response_tokens: float) -> None:
    """Scales the attached losses, which are sums over tokens, by the tokens of the whole mini-batch.

    So packing changes nothing. Routers see prompts and responses, multi-token prediction learns the responses.
    """
    set_aux_loss_scale(model, 1.0 / num_tokens)
    for module in model.modules():
        if isinstance(module, MultiTokenPredictionBlock):
            module.aux_loss_scaler.scale = 1.0 / num_response_tokens


def model_metrics(model: torch.nn.Module, config: TransformerConfig, groups: ProcessGroups) -> dict[str, float]:
    """Metrics of the attached losses and of the load of expert-parallel ranks; collective.

    Losses are without coefficients; those of experts are means over layers.
    """
    found = {}
    if config.num_moe_experts is not None and groups.ep.size() > 1:
        loads = collect_expert_loads(model, groups)
        if loads is not None:
            found["actor/expert_load_mean"], found["actor/expert_load_max"] = loads
    if config.num_moe_experts is not None and (config.moe_aux_loss_coeff or config.moe_z_loss_coeff):
        for name, by_layer in collect_moe_aux_losses(model, groups).items():
            found[f"actor/{name}"] = sum(by_layer.values()) / len(by_layer)
    if config.trains_mtp:
        for depth, value in enumerate(collect_mtp_losses(model, config, groups), start=1):
            found[f"actor/mtp_{depth}_loss"] = value
    return found
