"""One step of GRPO on one device: sample, sleep, score, update, wake, load, and sample with the new weights.

Letters: B samples, R tokens of a response, T tokens of all samples with their prompts, K experts of a token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.core.memory_ledger import ON_DEVICE, ledger, total_bytes
from megatron.core.ops import resolve
from megatron.core.transformer.moe.router_replay import RouterReplay
from mindspeed_llm.export_weights import export_weights
from tools.workshop.bench.models import CHECKPOINTS, Batch, deepseek_v3_config
from tools.workshop.bench.train_engine import micro_batch
from tools.workshop.gpu_day.engines import TRAIN_OPS, Trainer, new_engine, prompts
from tools.workshop.gpu_day.rows import Rows
from verl.trainer.ppo.algos.grpo import compute_grpo_outcome_advantage
from verl.trainer.ppo.policy_losses.vanilla import compute_policy_loss_vanilla
from verl.workers.config import ActorConfig
from vllm import LLM, SamplingParams
from vllm.platforms import resolve_platform


class Work(NamedTuple):
    """num_samples of each of num_prompts; most: of the mean difference of two engines' log-probs of a token."""

    raw: dict[str, Any]
    dtype: str
    num_prompts: int
    num_samples: int
    prompt_length: int
    response_length: int
    most: float


_TINY = CHECKPOINTS["tiny"]
_LAYERS = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 16, "vocab_size": 16384}
_MORE = {"q_lora_rank": 1536, "kv_lora_rank": 512, "num_nextn_predict_layers": 0, "eos_token_id": 1}
# DeepSeek-V3's layers, of half the widths around its own attention, beside the tiny model, which is exact enough to
# show every mistake.
_GPU = {
    "tiny, fp32": Work(_TINY, "float32", 4, 4, 24, 16, 1e-4),
    "DeepSeek-V3's layers, bf16": Work(deepseek_v3_config(2, **_LAYERS, **_MORE), "bfloat16", 8, 8, 256, 128, 0.02),
}
_CPU = {"tiny, fp32": Work(_TINY, "float32", 2, 2, 2, 2, 1e-4)}


class Samples(NamedTuple):
    """Samples as sequences, the rows of their responses in the packed T, tokens and log-probs [B, R], experts."""

    batch: Batch
    rows_BR: Tensor
    ids_BR: Tensor
    logprobs_BR: Tensor
    experts: list[np.ndarray]  # [tokens but the last, MoE layers, K] of each sample


def grpo_step(device: str, rows: Rows) -> None:
    """A step for each model."""
    for name, work in (_GPU if device == "cuda" else _CPU).items():
        _Step(name, work, device, rows).run()


class _Step:
    def __init__(self, name: str, work: Work, device: str, rows: Rows) -> None:
        self.name, self.work, self.device, self.rows = name, work, device, rows
        self.platform, self.is_exact = resolve_platform(device), work.dtype == "float32"
        self.trainer = Trainer(work.raw, resolve(TRAIN_OPS), device, getattr(torch, work.dtype))
        num_sequences, longest = work.num_prompts * work.num_samples, work.prompt_length + work.response_length + 1
        how = {"dtype": work.dtype, "enable_return_routed_experts": True}
        self.llm: LLM = new_engine(work.raw, device, num_sequences, longest, **how)

    def run(self) -> None:
        """The order of verl's step: the device never has the cache of one engine beside the optimizer of the other."""
        self._phase("load", self._load)
        samples = self._phase("generate", self._generate)
        self._phase("sleep", lambda: self.llm.sleep(2))
        old_T, experts = self._phase("score", lambda: self._score(samples))
        self._compare("the rollout's log-probs are the trainer's", samples, old_T)
        self._compare_experts(samples, experts)
        self._phase("update", lambda: self._update(samples, old_T))
        self._phase("wake and load", self._wake_and_load)
        again = self._phase("generate again", self._generate)
        self._phase("sleep again", lambda: self.llm.sleep(2))
        self.trainer.model.onload_params()
        gap = self._compare("its new log-probs are the trainer's, so the weights arrived", again, self._score(again)[0])
        moved = float((self._score(samples)[0] - old_T)[samples.rows_BR].abs().mean())
        note = f"the update moves a token's log-prob by {moved:.1e}, the engines differ by {gap:.1e}"
        self.rows.holds(f"{self.name}: the update is seen", moved > 5 * gap, note)
        self.llm.shutdown()

    def _phase(self, name: str, run: Callable[[], Any]) -> Any:
        """Run it; a row of its seconds and of what is on the device afterwards."""
        is_gpu = self.device == "cuda"
        if is_gpu:
            torch.cuda.reset_peak_memory_stats()
        self.platform.synchronize()
        start = time.perf_counter()
        result = run()
        self.platform.synchronize()
        took = time.perf_counter() - start
        report = self.llm.get_memory_report()
        of_trainer = total_bytes(ledger(self.trainer.model, self.trainer.optimizer), ON_DEVICE)
        held = {"rollout": report["weights_bytes"] + report["kv_cache_bytes"], "training": of_trainer}
        if is_gpu:
            held |= {"in use": torch.cuda.memory_allocated(), "at most": torch.cuda.max_memory_allocated()}
        note = ", ".join(f"{owner} {num_bytes / 2**20:.1f} MiB" for owner, num_bytes in held.items())
        self.rows.measured(f"{self.name}: {name}", took, "s", note=note)
        return result

    def _load(self) -> None:
        self.llm.update_weights(export_weights(self.trainer.model.module, self.trainer.hf, self.trainer.groups))

    def _wake_and_load(self) -> None:
        self.trainer.model.offload_grads()
        self.trainer.optimizer.offload()
        self.llm.wake_up(["weights"])
        self._load()
        self.trainer.model.offload_params()
        self.platform.empty_cache()
        self.llm.wake_up(["kv_cache"])

    def _generate(self) -> Samples:
        work = self.work
        params = SamplingParams(n=work.num_samples, max_tokens=work.response_length, seed=0, ignore_eos=True)
        asked = prompts((work.prompt_length,) * work.num_prompts, work.raw["vocab_size"])
        outputs = self.llm.generate(asked, params, use_tqdm=False)
        sampled = [(output.prompt_token_ids, sample) for output in outputs for sample in output.outputs]
        starts_B1 = torch.arange(len(sampled))[:, None] * (work.prompt_length + work.response_length)
        return Samples(
            Batch(tuple((*prompt, *sample.token_ids) for prompt, sample in sampled)),
            starts_B1 + work.prompt_length - 1 + torch.arange(work.response_length),  # each predicts the token after it
            torch.tensor([sample.token_ids for _, sample in sampled]),
            torch.tensor([sample.sampled_logprobs for _, sample in sampled]),
            [sample.routed_experts for _, sample in sampled if sample.routed_experts is not None],
        )

    @torch.no_grad()
    def _score(self, samples: Samples, replays: bool = False) -> tuple[Tensor, dict[int, Tensor]]:
        """Log-prob of every token's successor [T], and by layer the experts [T, K], on the host.

        replays: take the rollout's experts.
        """
        trainer = self.trainer
        micro = micro_batch(list(samples.batch.sequences), trainer.device)
        replay = RouterReplay(trainer.hf.n_routed_experts, trainer.groups)
        layers = filter(trainer.hf.is_moe_layer, range(trainer.hf.num_hidden_layers))
        routing = replay.replay(*_choices(samples, layers)) if replays else replay.record()
        packed = replace(micro.packed, routing=routing)
        losses_T = trainer.model.module(micro.ids_T, micro.positions_T, packed, micro.labels_T)
        return -losses_T.cpu(), {layer: chosen.cpu() for layer, chosen in routing.choices.items()}

    def _update(self, samples: Samples, old_T: Tensor) -> None:
        """Reward, group advantages and the clipped loss as verl computes them, by verl's own functions."""
        work, device, rows_BR = self.work, self.trainer.device, samples.rows_BR.to(self.trainer.device)
        mask_BR = torch.ones_like(samples.logprobs_BR)
        rewards_BR = torch.zeros_like(mask_BR)
        rewards_BR[:, -1] = samples.ids_BR.float().mean(-1) / work.raw["vocab_size"]  # the rule: large token ids
        groups = [index // work.num_samples for index in range(len(mask_BR))]
        advantages_BR, _ = compute_grpo_outcome_advantage(rewards_BR, mask_BR, groups)
        old_BR = old_T[samples.rows_BR].to(device)
        ratios: list[Tensor] = []

        def loss(losses_T: Tensor) -> Tensor:
            new_BR = -losses_T[rows_BR]
            ratios.append((new_BR.detach() - old_BR).exp())
            given = advantages_BR.to(device), mask_BR.to(device)
            value, _ = compute_policy_loss_vanilla(old_BR, new_BR, *given, "token-mean", config=ActorConfig())
            return value

        value, norm = self.trainer.step(samples.batch, loss=loss), self.trainer.grad_norm
        off = float((ratios[0] - 1).abs().max())
        self.rows.holds(f"{self.name}: the ratio is 1", off <= (1e-4 if self.is_exact else 1e-2), f"within {off:.1e}")
        is_well = bool(np.isfinite(value)) and bool(np.isfinite(norm)) and norm > 0
        note = f"loss {value:.2e}, gradient's norm {norm:.2e}, mean reward {float(rewards_BR.sum(-1).mean()):.2f}"
        self.rows.holds(f"{self.name}: the loss and its gradient are finite", is_well, note)

    def _compare(self, what: str, samples: Samples, of_trainer_T: Tensor) -> float:
        """The mean difference of a token's log-probs; in half precision, where rounding decides between experts that
        are as good, with the rollout's experts in the trainer too.
        """
        plain, notes = _difference(samples, of_trainer_T), []
        mean, most = plain
        if not self.is_exact:
            mean, most = _difference(samples, self._score(samples, replays=True)[0])
            notes = [f"{plain[0]:.1e} and {plain[1]:.1e} with experts of its own"]
        notes = [f"mean difference {mean:.1e} (at most {self.work.most:g}), largest {most:.1e}", *notes]
        self.rows.holds(f"{self.name}: {what}", mean <= self.work.most, ", ".join(notes))
        return mean

    def _compare_experts(self, samples: Samples, of_trainer: dict[int, Tensor]) -> None:
        """Tokens and layers with the same experts in both engines; in fp32 all of them."""
        of_rollout, is_known_T = _choices(samples, of_trainer)
        pairs = ((chosen[is_known_T].long(), of_rollout[layer][is_known_T]) for layer, chosen in of_trainer.items())
        same = torch.stack([(ours.sort(-1).values == theirs.sort(-1).values).all(-1) for ours, theirs in pairs])
        share, name = float(same.float().mean()), f"{self.name}: both engines choose the same experts"
        if self.is_exact:
            self.rows.holds(name, share == 1.0, f"for {share:.2%} of {same.numel()} tokens and layers")
        else:
            self.rows.measured(name, share, f"of {same.numel()} tokens and layers")


def _difference(samples: Samples, of_trainer_T: Tensor) -> tuple[float, float]:
    """Mean and largest difference of a token's log-probs."""
    differences_BR = (samples.logprobs_BR - of_trainer_T[samples.rows_BR]).abs()
    return float(differences_BR.mean()), float(differences_BR.max())


def _choices(samples: Samples, layers: Iterable[int]) -> tuple[dict[int, Tensor], Tensor]:
    """The rollout's experts by layer, int64 [T, K], and for which of the T it has any: not for a sample's last."""
    padded = [np.concatenate((chosen, chosen[-1:])) for chosen in samples.experts]
    experts_TLK = torch.from_numpy(np.concatenate(padded).astype(np.int64))
    is_known_T = torch.cat([torch.arange(len(chosen)) < len(chosen) - 1 for chosen in padded])
    return {layer: experts_TLK[:, index] for index, layer in enumerate(sorted(layers))}, is_known_T
