"""Config of the actor's update and of the reference's log-probs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from verl.workers.config.engine import McoreEngineConfig
from verl.workers.config.optimizer import McoreOptimizerConfig
from verl.workers.config.profiler import ProfilerConfig
from verl.workers.config.values import NOT_NEGATIVE, Section, Values, at_least, one_of

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
CHECKPOINT_CONTENTS = ("model", "optimizer", "extra", "hf_model")
KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
# With the gradient of k2, which differs from their own.
STRAIGHT_THROUGH_KL_TYPES = tuple(f"{kind}+" for kind in KL_TYPES)


@dataclass(frozen=True)
class CheckpointConfig(Section):
    """What a training checkpoint holds.

    Attributes:
        save_contents: ``model``, ``optimizer`` (master weights, moments), ``extra`` (learning rate's schedule, random
            generators) and ``hf_model`` (the weights under Hugging Face names too). ``model`` must be among them.
        load_contents: which of these a resume reads; absent means those of ``save_contents``. Without ``optimizer``
            its moments start anew, without ``extra`` the learning rate's schedule does. A resume from a checkpoint that
            lacks one of them is refused.
        async_save: the next step starts as soon as the state is copied to host memory, and files are written in the
            background.
    """

    save_contents: list[str] = field(default_factory=lambda: ["model", "optimizer", "extra"])
    load_contents: list[str] | None = None
    async_save: bool = False

    @property
    def loaded_contents(self) -> tuple[str, ...]:
        """What a resume reads."""
        contents = self.save_contents if self.load_contents is None else self.load_contents
        return tuple(name for name in contents if name != "hf_model")

    def contradictions(self, where: str) -> list[str]:
        found = []
        for key, given in (("save_contents", self.save_contents), ("load_contents", self.loaded_contents)):
            if unknown := [name for name in given if name not in CHECKPOINT_CONTENTS]:
                found.append(f"{where}.{key} has {', '.join(unknown)}; expected {', '.join(CHECKPOINT_CONTENTS)}")
            if "model" not in given:
                found.append(f"{where}.{key} is {given}; it must have model, which every resume starts from")
        return found


@dataclass(frozen=True)
class PolicyLossConfig(Section):
    """Which registered policy loss the actor uses.

    Attributes:
        loss_mode: registered name of the loss: PPO's clipped loss (``vanilla``), ``gspo``, ``cispo``, ``gpg``,
            ``clip_cov``, ``kl_cov``, ``geo_mean``, or one of the user's.
        clip_cov_ratio: the share of tokens that ``clip_cov`` takes out of the loss, at least one token.
        clip_cov_lb: the lowest covariance of such a token.
        clip_cov_ub: the highest covariance of such a token.
        kl_cov_ratio: the share of tokens that ``kl_cov`` penalises, at least one token.
        ppo_kl_coef: factor of the penalty of ``kl_cov``.
    """

    VALUES: ClassVar = {
        **dict.fromkeys(("clip_cov_ratio", "kl_cov_ratio"), Values("expected 0 to 1", lambda value: 0 <= value <= 1)),
        "ppo_kl_coef": NOT_NEGATIVE,
    }

    loss_mode: str = "vanilla"
    clip_cov_ratio: float = 0.0002
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 0.0002
    ppo_kl_coef: float = 0.1


@dataclass(frozen=True)
class RouterReplayConfig(Section):
    """Which routing an update of a MoE model uses.

    Attributes:
        mode: ``disabled`` routes anew, ``R2`` replays the experts of the old log-prob pass, ``R3`` those of the
            rollout, which the old log-prob pass then uses too. ``auto`` means R3 if the rollout reports its experts,
            else R2 if that pass runs anyway, else disabled; it is resolved when the config is loaded.
    """

    VALUES: ClassVar = {"mode": one_of("auto", "disabled", "R2", "R3")}

    mode: str = "auto"


@dataclass(frozen=True)
class ActorConfig(Section):
    """One PPO/GRPO update; batch sizes count prompts (``ppo_mini_batch_size``) and samples (micro).

    Attributes:
        ppo_mini_batch_size: prompts of one optimizer step; it must divide ``data.train_batch_size``.
        ppo_micro_batch_size_per_gpu: samples of one forward and backward pass on a rank; required without
            ``use_dynamic_bsz``.
        use_dynamic_bsz: fill micro-batches by tokens instead, up to ``ppo_max_token_len_per_gpu``.
        ppo_max_token_len_per_gpu: packed tokens of a micro-batch on each rank; with context parallelism a micro-batch
            has CP times as many. A longer sample gets a micro-batch of its own.
        clip_ratio: distance from 1 at which the ratio of new to old probability is clipped.
        clip_ratio_low: that distance below 1; absent means ``clip_ratio``.
        clip_ratio_high: that distance above 1; absent means ``clip_ratio``. DAPO's clip-higher sets it alone.
        clip_ratio_c: bound of the dual clip, for negative advantages.
        loss_agg_mode: how token losses become one number: the mean over all tokens of the mini-batch, or sums or means
            per sequence first.
        entropy_coeff: factor of the entropy that is subtracted from the loss.
        use_kl_loss: add the KL to the reference policy to the loss; each step then computes reference log-probs.
        kl_loss_coef: factor of that KL.
        kl_loss_type: estimator of that KL; ``k1`` equals ``kl``, ``k2`` equals ``mse``, ``k3`` equals ``low_var_kl``.
            With a ``+``, as ``k3+``, its value with the gradient of ``k2``.
        ppo_epochs: passes of the update over the batch of a step.
        shuffle: shuffle rows before they are cut into mini-batches, and the mini-batches in each epoch. A mini-batch
            has the same rows in every layout, with and without it.
        data_loader_seed: seed of that order.
        recompute_old_log_prob: compute log-probs before the update: ``auto`` and ``False`` only if they differ from
            those of the update itself, ``True`` always.
        share_prompts: compute a prompt once for all of its samples in a micro-batch; attention alone sees whole
            samples, and a rank gets all samples of a prompt. It changes rounding, and nothing else. Context
            parallelism, multi-token prediction, ``seq_aux_loss`` and replayed routing need whole sequences: with one of
            them ``auto`` shares nothing, and ``True`` is refused.
        load_weight: load the weights; False initialises actor and reference at random.
    """

    VALUES: ClassVar = {
        **dict.fromkeys(("ppo_epochs", "ppo_mini_batch_size"), at_least(1)),
        **dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high"), NOT_NEGATIVE),
        "loss_agg_mode": one_of(*LOSS_AGG_MODES),
        "kl_loss_type": one_of(*KL_TYPES, *STRAIGHT_THROUGH_KL_TYPES),
        **dict.fromkeys(
            ("recompute_old_log_prob", "share_prompts"),
            Values("expected one of auto, true, false", lambda value: value.lower() in ("auto", "true", "false")),
        ),
    }

    ppo_mini_batch_size: int = 256
    ppo_micro_batch_size_per_gpu: int | None = None
    use_dynamic_bsz: bool = False
    ppo_max_token_len_per_gpu: int = 16384
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    loss_agg_mode: str = "token-mean"
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"
    ppo_epochs: int = 1
    shuffle: bool = False
    data_loader_seed: int = 1
    recompute_old_log_prob: str = "auto"
    share_prompts: str = "false"
    load_weight: bool = True
    optim: McoreOptimizerConfig = field(default_factory=McoreOptimizerConfig)
    megatron: McoreEngineConfig = field(default_factory=McoreEngineConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    router_replay: RouterReplayConfig = field(default_factory=RouterReplayConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)

    def shuffle_seed(self, global_step: int, epoch: int = 0) -> int:
        """Seed of the order of rows in a step's mini-batches, and of the mini-batches in each epoch."""
        return self.data_loader_seed + global_step * 1009 + epoch

    @property
    def clip_low(self) -> float:
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high

    @property
    def replays_routing(self) -> bool:
        return self.router_replay.mode in ("R2", "R3")

    @property
    def records_routing(self) -> bool:
        """Whether updates replay the experts of the old log-prob pass."""
        return self.router_replay.mode == "R2"

    @property
    def takes_rollout_routing(self) -> bool:
        """Whether updates replay the experts of the rollout."""
        return self.router_replay.mode == "R3"

    def needs_old_log_prob(self, train_batch_size: int) -> bool:
        """False when one update per batch makes the ratio exactly 1, so that log_prob.detach() is the old one.

        Router replay R2 needs the pass in any case: it is where routing is recorded.
        """
        if self.records_routing or self.recompute_old_log_prob.lower() == "true":
            return True
        return self.ppo_epochs != 1 or self.ppo_mini_batch_size != train_batch_size

    @property
    def shares_prompts(self) -> bool:
        return self.share_prompts.lower() != "false" and not self._needs_whole_sequences()

    def _needs_whole_sequences(self) -> list[str]:
        """What is set that cannot do with prompts that are computed once."""
        overrides = self.megatron.override_transformer_config
        needs = {
            f"megatron.context_parallel_size is {self.megatron.context_parallel_size}": (
                self.megatron.context_parallel_size > 1
            ),
            f"router_replay.mode is {self.router_replay.mode}": self.replays_routing,
            "megatron.override_transformer_config.mtp_num_layers is above 0": bool(overrides.get("mtp_num_layers")),
            "megatron.override_transformer_config.moe_router_load_balancing_type is seq_aux_loss": (
                overrides.get("moe_router_load_balancing_type") == "seq_aux_loss"
            ),
        }
        return [name for name, is_set in needs.items() if is_set]

    def contradictions(self, where: str) -> list[str]:
        found = []
        if self.policy_loss.loss_mode == "vanilla" and self.clip_ratio_c <= 1:
            found.append(f"{where}.clip_ratio_c is {self.clip_ratio_c}; the dual clip's bound must be above 1")
        if self.megatron.swap_optimizer and self.optim.override_optimizer_config.get("optimizer_cpu_offload"):
            found.append(
                f"{where}: megatron.swap_optimizer and optim.override_optimizer_config.optimizer_cpu_offload both keep "
                "the state on the host; choose one"
            )
        if self.share_prompts.lower() == "true":
            found += [
                f"{where}.share_prompts is True, and {where}.{other}, which needs whole sequences; set one of them back"
                for other in self._needs_whole_sequences()
            ]
        if not self.use_dynamic_bsz and not self.ppo_micro_batch_size_per_gpu:
            found.append(
                f"{where}.ppo_micro_batch_size_per_gpu is empty; give it (samples per micro-batch) or set "
                f"{where}.use_dynamic_bsz=True with ppo_max_token_len_per_gpu"
            )
        return found


@dataclass(frozen=True)
class RefConfig(Section):
    """Log-probs under the reference weights; ``megatron`` starts as a copy of the actor's.

    Attributes:
        log_prob_micro_batch_size_per_gpu: samples of one forward pass on a rank.
        log_prob_use_dynamic_bsz: fill micro-batches by tokens instead.
        log_prob_max_token_len_per_gpu: packed tokens of a micro-batch on a rank; a longer sample has one of its own.
    """

    log_prob_micro_batch_size_per_gpu: int | None = None
    log_prob_use_dynamic_bsz: bool = False
    log_prob_max_token_len_per_gpu: int = 16384
    megatron: McoreEngineConfig = field(default_factory=McoreEngineConfig)
