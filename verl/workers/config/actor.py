"""Config of the actor's update and of the reference's log-probs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.workers.config.engine import McoreEngineConfig
from verl.workers.config.keys import NOT_NEGATIVE, Idle, Section, Values, above, at_least, beside, between, key, one_of
from verl.workers.config.optimizer import McoreOptimizerConfig
from verl.workers.config.profiler import NO_PROFILER, ProfilerConfig

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
CHECKPOINT_CONTENTS = ("model", "optimizer", "extra", "hf_model")
KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
# With the gradient of k2, which differs from their own.
STRAIGHT_THROUGH_KL_TYPES = tuple(f"{kind}+" for kind in KL_TYPES)
# The losses of this repository; those of a user may read any key.
_LOSSES = ("vanilla", "gspo", "cispo", "gpg", "clip_cov", "kl_cov", "geo_mean", "sapo", "dppo_tv")
_SWITCH = Values("expected one of auto, true, false", lambda value: value.lower() in ("auto", "true", "false"))


def _is_reinforce(run: Any, own: Any) -> Any:
    return run.algorithm.rollout_correction.is_reinforce


def _mode(run: Any) -> Any:
    """The loss of the run; ``reinforce`` is that of ``gpg``."""
    return "gpg" if _is_reinforce(run, None) else run.actor_rollout_ref.actor.policy_loss.loss_mode


def _only_of(name: str) -> Idle:
    """A key changes nothing with another loss of this repository than ``name``."""
    return Idle(f"only the loss {name} has it", lambda run, own: _mode(run) in _LOSSES and _mode(run) != name)


def _fill_by_tokens(run: Any) -> tuple[bool, bool, bool]:
    models = run.actor_rollout_ref
    return models.actor.use_dynamic_bsz, models.rollout.log_prob_use_dynamic_bsz, models.ref.log_prob_use_dynamic_bsz


# The sizes of the other two follow the actor's.
_BY_TOKENS = Idle("{where}.use_dynamic_bsz is True", lambda run, own: all(_fill_by_tokens(run)))
_BY_SAMPLES = Idle("{where}.use_dynamic_bsz is False", lambda run, own: not any(_fill_by_tokens(run)))
_CLIPS_NOTHING = (
    Idle(
        "a step makes one update, so that every ratio is 1",
        lambda run, own: (
            not run.needs_old_log_prob and not run.algorithm.rollout_correction.bypass_mode and _mode(run) in _LOSSES
        ),
    ),
    Idle("this policy loss clips nothing", lambda run, own: _mode(run) in ("gpg", "kl_cov", "sapo")),
)


@dataclass(frozen=True)
class CheckpointConfig(Section):
    """What a training checkpoint holds."""

    #: ``model``, ``optimizer`` (master weights, moments), ``extra`` (learning rate's schedule, random generators) and
    #: ``hf_model`` (the weights under Hugging Face names too). ``model`` must be among them.
    save_contents: list[str] = key(lambda: ["model", "optimizer", "extra"])
    #: which of these a resume reads; absent means those of ``save_contents``. Without ``optimizer`` its moments start
    #: anew, without ``extra`` the learning rate's schedule does. A resume from a checkpoint that lacks one of them is
    #: refused.
    load_contents: list[str] | None = None
    #: the next step starts as soon as the state is copied to host memory, and files are written in the background.
    async_save: bool = False

    @property
    def loaded_contents(self) -> tuple[str, ...]:
        """What a resume reads."""
        contents = self.save_contents if self.load_contents is None else self.load_contents
        return tuple(name for name in contents if name != "hf_model")

    def contradictions(self, where: str) -> Iterator[str]:
        for name, given in (("save_contents", self.save_contents), ("load_contents", self.loaded_contents)):
            if unknown := [part for part in given if part not in CHECKPOINT_CONTENTS]:
                yield f"{where}.{name} has {', '.join(unknown)}; expected {', '.join(CHECKPOINT_CONTENTS)}"
            if "model" not in given:
                yield f"{where}.{name} is {given}; it must have model, which every resume starts from"


@dataclass(frozen=True)
class PolicyLossConfig(Section):
    """Which registered policy loss the actor uses."""

    #: registered name of the loss: PPO's clipped loss (``vanilla``), ``gspo``, ``cispo``, ``gpg``, ``clip_cov``,
    #: ``kl_cov``, ``geo_mean``, ``sapo``, ``dppo_tv``, or one of the user's.
    loss_mode: str = key(
        "vanilla", Idle("algorithm.rollout_correction.loss_type is reinforce, a loss of its own", _is_reinforce)
    )
    #: the share of tokens that ``clip_cov`` takes out of the loss, at least one token.
    clip_cov_ratio: float = key(0.0002, between(0, 1), _only_of("clip_cov"))
    clip_cov_lb: float = key(1.0, _only_of("clip_cov"))  #: the lowest covariance of such a token.
    clip_cov_ub: float = key(5.0, _only_of("clip_cov"))  #: the highest covariance of such a token.
    #: the share of tokens that ``kl_cov`` penalises, at least one token.
    kl_cov_ratio: float = key(0.0002, between(0, 1), _only_of("kl_cov"))
    ppo_kl_coef: float = key(0.1, NOT_NEGATIVE, _only_of("kl_cov"))  #: factor of the penalty of ``kl_cov``.
    #: how fast ``sapo`` fades where the ratio leaves 1, for positive advantages.
    tau_pos: float = key(1.0, above(0), _only_of("sapo"), names={"0.9.0": "../tau_pos"})
    tau_neg: float = key(1.05, above(0), _only_of("sapo"), names={"0.9.0": "../tau_neg"})  #: the same for the others.


@dataclass(frozen=True)
class RouterReplayConfig(Section):
    """Which routing an update of a MoE model uses."""

    #: ``disabled`` routes anew, ``R2`` replays the experts of the old log-prob pass, ``R3`` those of the rollout, which
    #: the old log-prob pass then uses too. ``auto`` means R3 if the rollout reports its experts, else R2 if that pass
    #: runs anyway, else disabled; it is resolved when the config is loaded.
    mode: str = key("auto", one_of("auto", "disabled", "R2", "R3"), names={"0.9.0": "../megatron.router_replay.mode"})


@dataclass(frozen=True)
class ActorConfig(Section):
    """One PPO/GRPO update; batch sizes count prompts (``ppo_mini_batch_size``) and samples (micro)."""

    #: prompts of one optimizer step; it must divide ``data.train_batch_size``.
    ppo_mini_batch_size: int = key(256, at_least(1))
    #: samples of one forward and backward pass on a rank; required without ``use_dynamic_bsz``.
    ppo_micro_batch_size_per_gpu: int | None = key(None, _BY_TOKENS)
    use_dynamic_bsz: bool = False  #: fill micro-batches by tokens instead, up to ``ppo_max_token_len_per_gpu``.
    #: packed tokens of a micro-batch on each rank; with context parallelism a micro-batch has CP times as many. A
    #: longer sample gets a micro-batch of its own.
    ppo_max_token_len_per_gpu: int = key(16384, _BY_SAMPLES)
    #: distance from 1 at which the ratio of new to old probability is clipped; of ``dppo_tv``, the largest difference
    #: of both.
    clip_ratio: float = key(0.2, NOT_NEGATIVE, *_CLIPS_NOTHING)
    #: that distance below 1; absent means ``clip_ratio``.
    clip_ratio_low: float | None = key(None, NOT_NEGATIVE, *_CLIPS_NOTHING)
    #: that distance above 1; absent means ``clip_ratio``. DAPO's clip-higher sets it alone.
    clip_ratio_high: float | None = key(None, NOT_NEGATIVE, *_CLIPS_NOTHING)
    #: bound of the dual clip, for negative advantages.
    clip_ratio_c: float = key(3.0, _only_of("vanilla"), *_CLIPS_NOTHING)
    policy_loss: PolicyLossConfig = key(PolicyLossConfig)
    #: how token losses become one number: the mean over all tokens of the mini-batch, or sums or means per sequence
    #: first.
    loss_agg_mode: str = key("token-mean", one_of(*LOSS_AGG_MODES))
    entropy_coeff: float = 0.0  #: factor of the entropy that is subtracted from the loss.
    #: add the KL to the reference policy to the loss; each step then computes reference log-probs.
    use_kl_loss: bool = False
    kl_loss_coef: float = key(0.001, beside("use_kl_loss", False))  #: factor of that KL.
    #: estimator of that KL; ``k1`` equals ``kl``, ``k2`` equals ``mse``, ``k3`` equals ``low_var_kl``. With a ``+``, as
    #: ``k3+``, its value with the gradient of ``k2``.
    kl_loss_type: str = key("low_var_kl", one_of(*KL_TYPES, *STRAIGHT_THROUGH_KL_TYPES), beside("use_kl_loss", False))
    ppo_epochs: int = key(1, at_least(1))  #: passes of the update over the batch of a step.
    #: shuffle rows before they are cut into mini-batches, and the mini-batches in each epoch. A mini-batch has the same
    #: rows in every layout, with and without it.
    shuffle: bool = False
    data_loader_seed: int = key(1, beside("shuffle", False))  #: seed of that order.
    #: compute log-probs before the update: ``auto`` and ``False`` only if they differ from those of the update itself,
    #: ``True`` always.
    recompute_old_log_prob: str = key("auto", _SWITCH)
    #: compute a prompt once for all of its samples in a micro-batch; attention alone sees whole samples. They stay
    #: together on a rank and in its micro-batches, where limits of tokens count the prompt once. It changes rounding,
    #: and nothing else. Context parallelism, ``seq_aux_loss`` and replayed routing need whole sequences: with one of
    #: them ``auto`` shares nothing, and ``True`` is refused. ``auto`` shares nothing on an NPU, where attention would
    #: copy prompts. The layers of multi-token prediction compute whole sequences in any case.
    share_prompts: str = key("auto", _SWITCH, names={"0.9.0": "use_prefix_grouper"})
    load_weight: bool = True  #: load the weights; False initialises actor and reference at random.
    optim: McoreOptimizerConfig = key(McoreOptimizerConfig)
    megatron: McoreEngineConfig = key(McoreEngineConfig)
    checkpoint: CheckpointConfig = key(CheckpointConfig)
    router_replay: RouterReplayConfig = key(RouterReplayConfig)
    profiler: ProfilerConfig = key(ProfilerConfig, NO_PROFILER)

    @property
    def global_batch_info(self) -> dict[str, Any]:
        """What losses of v0.9.0 hand on to ``agg_loss``: nothing, as it knows the batch here."""
        return {}

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

    def skip_sharing_reason(self, device: str) -> str:
        """Why samples do not share their prompt on ``device`` (cpu, cuda or npu); empty where they do."""
        if self.share_prompts.lower() == "false":
            return "share_prompts is False"
        if self.share_prompts.lower() == "auto" and device == "npu":
            return "attention on an NPU would copy prompts"
        return next(self._needs_whole_sequences(), "")

    def _needs_whole_sequences(self) -> Iterator[str]:
        """What is set that cannot do with prompts that are computed once."""
        overrides, cp = self.megatron.override_transformer_config, self.megatron.context_parallel_size
        if cp > 1:
            yield f"megatron.context_parallel_size is {cp}"
        if self.replays_routing:
            yield f"router_replay.mode is {self.router_replay.mode}"
        if overrides.get("moe_router_load_balancing_type") == "seq_aux_loss":
            yield "megatron.override_transformer_config.moe_router_load_balancing_type is seq_aux_loss"

    def contradictions(self, where: str) -> Iterator[str]:
        if self.policy_loss.loss_mode == "vanilla" and self.clip_ratio_c <= 1:
            yield f"{where}.clip_ratio_c is {self.clip_ratio_c}; the dual clip's bound must be above 1"
        if self.megatron.swap_optimizer and self.optim.override_optimizer_config.get("optimizer_cpu_offload"):
            yield (
                f"{where}: megatron.swap_optimizer and optim.override_optimizer_config.optimizer_cpu_offload both keep "
                "the state on the host; choose one"
            )
        if self.share_prompts.lower() == "true":
            for other in self._needs_whole_sequences():
                yield (
                    f"{where}.share_prompts is True, and {where}.{other}, which needs whole sequences; set one of them "
                    "back"
                )
        if not self.use_dynamic_bsz and not self.ppo_micro_batch_size_per_gpu:
            yield (
                f"{where}.ppo_micro_batch_size_per_gpu is empty; give it (samples per micro-batch) or set "
                f"{where}.use_dynamic_bsz=True with ppo_max_token_len_per_gpu"
            )


@dataclass(frozen=True)
class RefConfig(Section):
    """Log-probs under the reference weights; ``megatron`` starts as a copy of the actor's."""

    #: samples of one forward pass on a rank.
    log_prob_micro_batch_size_per_gpu: int | None = key(None, beside("log_prob_use_dynamic_bsz", True))
    log_prob_use_dynamic_bsz: bool = False  #: fill micro-batches by tokens instead.
    #: packed tokens of a micro-batch on a rank; a longer sample has one of its own.
    log_prob_max_token_len_per_gpu: int = key(16384, beside("log_prob_use_dynamic_bsz", False))
    megatron: McoreEngineConfig = key(McoreEngineConfig)
