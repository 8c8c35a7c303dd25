"""Keys of upstream's scripts that have no effect here: each is checked against this table, dropped, and reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

GIVEN_EMPTY = "given empty, so it keeps its default"
_ANY: tuple[Any, ...] = ()
_FLAG = (True, False)
_MODEL, _ROLES, _ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("model", "*", "rollout"))
_ACTOR, _OPTIM, _VLLM = "actor_rollout_ref.actor", "actor_rollout_ref.actor.optim", f"{_ROLLOUT}.engine_kwargs.vllm"
_ENGINE = f"{_ROLES}.megatron"  # the actor's and the reference's
_OVERRIDE = f"{_ENGINE}.override_transformer_config"
_OPS = "trainer.train_ops decides which kernels run"
_NO_CRITIC = "no estimator here uses a critic network"
_NO_REWARD_NETWORK = "rewards are functions: there is no reward network"
_NO_TOOL = "the tools are torch and npu"
_LOAD_FORMATS = ("dummy", "auto", "safetensors", "dummy_megatron", "auto_megatron")
_ONE_ENGINE = "one engine trains: weights and gradients are whole on each data-parallel rank, the optimizer is sharded"
# Upstream's engines that shard weights over all data-parallel ranks; ``dp`` is the group of FSDP's config.
SHARDING_ENGINES = ("dp", "fsdp", "fsdp2", "torchtitan", "veomni", "automodel")
_ENGINES = ("megatron", "mindspeed", "mindspeed_megatron", "mlite", *SHARDING_ENGINES)
_SHARDING = "weights are not sharded over data-parallel ranks; where one is too small, tensor parallelism splits them"
_NO_COPY = "weights are computed in megatron.dtype, with float32 masters in the optimizer, whatever this is"
_BLOCKS, _PACKED = "logits and entropy are always computed in blocks", "training always works on packed tokens"
_NO_LORA, _NO_QAT = "all weights are trained: there is no LoRA", "there is no quantization-aware training"
_NO_TURNS = "actor_rollout_ref.rollout.multi_turn has the turns of a sample"
_NO_FUNCTIONS = "multi_turn.tool_config_path or multi_turn.environment has the tools"
_EXACT_TOKENS = "a row is what the engine was given and sampled; text is never tokenised again"
_NO_TEACHER, _NO_SPARSE = "there is no distillation", "there is no sparse attention (DSA)"
_ADAMW, _SCHEDULE, _TEXTS = "the optimizer is AdamW", "lr_decay_style is the schedule", "prompts are texts"
_SPECULATION, _PLANNED = (
    "drafts are those of vLLM's keys, mtp.num_speculative_tokens of them",
    "the order of steps is trainer.schedule's",
)
_SAVED = "trainer.save_rollouts writes batches, and trainer.train_only trains on them"
_OWN_ENGINE = "this repository's engine takes its place"
_GRAPHS = ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL", "PIECEWISE")


def _absent(section: str, switch: str, why: str, off: Any = False) -> tuple[tuple[str, str, tuple[Any, ...], str], ...]:
    """Rows of a feature that is not there: its switch must be off, and its other keys are nothing then."""
    return (section, switch, (off,), why), (section, f"{switch.rpartition('.')[0]}.*".lstrip("."), _ANY, why)


# section, its keys or shell patterns, accepted values, what happens instead; the first pattern that matches counts
_TABLE: tuple[tuple[str, str, tuple[Any, ...], str], ...] = (
    ("*", "_target_", _ANY, "the schema has the classes"),
    ("data", "reward_fn_key", ("data_source",), "the column that every reward function is given"),
    ("data", "return_full_prompt return_raw_input_ids", _FLAG, "rows carry their whole prompt, as text and token ids"),
    ("*", "trust_remote_code", _FLAG, "model directories are never executed"),
    ("data", "tokenizer", (None,), "actor_rollout_ref.model.path has the tokenizer"),
    ("data", "datagen.*", (None,), "prompts come from data.train_files"),
    ("data", "filter_overlong_prompts_workers dataloader_num_workers", _ANY, "prompts are tokenised together, once"),
    ("data", "image_* video_key audio_key mm_processor_kwargs.* return_multi_modal_inputs", _ANY, _TEXTS),
    ("data", "validation_shuffle", (False,), "validation rows keep the order of their file"),
    ("data", "tool_config_path function_tool_path", (None,), _NO_TURNS),
    ("data", "continuous_token.*", _ANY, _EXACT_TOKENS),
    (_MODEL, "enable_activation_offload", _FLAG, "activations stay on the device, or are computed again"),
    (_MODEL, "lora_rank lora.rank", (0,), _NO_LORA),
    (_MODEL, "lora_alpha lora.* target_modules exclude_modules", _ANY, _NO_LORA),
    (_MODEL, "lora_adapter_path tokenizer_path hf_config_path", (None,), "the folder model.path has all of the model"),
    (_MODEL, "mtp.speculative*", _ANY, _SPECULATION),
    (_MODEL, "mtp.method", ("mtp",), _SPECULATION),
    (_ROLES, "use_fused_kernels", _FLAG, _OPS),
    ("", "data.use_shm actor_rollout_ref.model.use_shm", _FLAG, "files are read where they are"),
    ("*.override_*config", "attention_dropout hidden_dropout embd_pdrop resid_pdrop", (0.0,), "there is no dropout"),
    (_ROLES, "strategy model_engine", _ENGINES, _ONE_ENGINE),
    (_ROLES, "entropy_checkpointing entropy_from_logits_*", _ANY, _BLOCKS),
    (_ROLES, "use_remove_padding pad_*", _ANY, _PACKED),
    (_ROLES, "rollout_n", _ANY, "actor_rollout_ref.rollout.n decides"),
    (_ROLES, "freeze_vision_tower", _FLAG, _TEXTS),
    *_absent(_ROLES, "qat.enable", _NO_QAT),
    (_ROLES, "full_determinism forward_only", _ANY, "the same seed, layout and device give the same bits"),
    (_ROLES, "fsdp_size reshard_after_forward forward_prefetch use_orig_params wrap_policy.*", _ANY, _SHARDING),
    (f"{_ROLES}.veomni", "enable_fsdp_offload", (False,), "param_offload and optimizer_offload decide"),
    (f"{_ROLES}.veomni", "*_implementation force_use_huggingface mixed_precision", _ANY, _OPS),
    (f"{_ROLES}.veomni", "enable_* basic_modules init_device ckpt_manager load_* *_limit", _ANY, _SHARDING),
    (f"{_ROLES}.fsdp_config", "model_dtype mixed_precision.buffer_dtype", ("fp32", "bf16", "bfloat16"), _NO_COPY),
    (f"{_ROLES}.torchtitan", "data_parallel_*size max_seq_len mixed_precision spmd_backend", _ANY, _SHARDING),
    (_ROLES, "use_liger fused_kernel_options.* tiled_mlp.* attn_type attention_backend* impl_cfg.use_thd", _ANY, _OPS),
    (f"{_ROLES}.engine.impl_cfg", "optimizer", ("fsdp2", "dist_opt"), _SHARDING),
    (_ACTOR, "use_rollout_log_probs", (False,), "algorithm.rollout_correction.bypass_mode decides"),
    (_ACTOR, "calculate_entropy", _FLAG, "entropy is always measured"),
    (_ACTOR, "calculate_sum_pi_squared", (False,), "the estimator optimal_token_baseline is not there"),
    (_ACTOR, "loss_scale_factor", (None,), "data.max_response_length is the scale"),
    ("actor_rollout_ref.actor.checkpoint", "strict mbridge_config.*", _ANY, "a checkpoint is always read whole"),
    (f"{_ROLES}.router_replay", "record_file replay_file", (None,), "routing travels with the batch"),
    ("actor_rollout_ref.ref", "optim.*", _ANY, "the reference is not trained"),
    ("actor_rollout_ref.ref", "router_replay.* megatron.router_replay.*", _ANY, "the actor's routing counts for both"),
    (_ACTOR, "policy_loss.dro_beta", (None,), "there is no DRO"),
    (_OPTIM, "optimizer optimizer_impl name", ("AdamW", "adamw", "adam", "torch.optim", None), _ADAMW),
    (_OPTIM, "muon_* use_layer_wise_distributed_optimizer", _ANY, _ADAMW),
    (_OPTIM, "zero_indexed_step num_cycles *_incr_style lr_wsd_* *decay_ratio decay_type use_check*", _ANY, _SCHEDULE),
    (_OPTIM, "total_training_steps", _ANY, "trainer.total_training_steps decides"),
    (_ROLES, "use_torch_compile", _FLAG, "training uses no torch.compile"),
    (_ACTOR, "ppo_micro_batch_size", (None,), "use ppo_micro_batch_size_per_gpu"),
    ("actor_rollout_ref.ref", "profiler.*", _ANY, "it runs in the actor's processes: actor.profiler decides"),
    (f"{_ROLES}.profiler.tool_config", "nsys.* torch_memory.* precision_debugger.*", _ANY, _NO_TOOL),
    (f"{_ROLES}.profiler.tool_config", "torch.*", _ANY, "whole steps are recorded, CPU and device, in one trace"),
    (f"{_ROLES}.profiler.tool_config", "npu.discrete npu.profile_token_*", _ANY, "a trace has all phases of a step"),
    ("global_profiler", "global_tool_config.*", _ANY, _NO_TOOL),
    (_ENGINE, "use_mbridge vanilla_mbridge", _FLAG, "weights are read from Hugging Face files by one plan"),
    (_ENGINE, "use_megatron_fsdp", _FLAG, _SHARDING),
    (_ENGINE, "override_mcore_model_config", (None,), "override_transformer_config has the model's settings"),
    (_ENGINE, "dist_checkpointing_prefix dist*_fully_reshardable*", _ANY, "a checkpoint is read into any layout"),
    (_ENGINE, "dynamic_context_parallel", (False,), "context parallelism splits every sequence alike"),
    (_ENGINE, "max_seqlen_per_dp_cp_rank", _ANY, "context parallelism splits every sequence alike"),
    (_OVERRIDE, "micro_batch_size", _ANY, "ppo_micro_batch_size_per_gpu or tokens make micro-batches"),
    (_OVERRIDE, "spec swiglu normalization moe_router_enable_expert_bias", _ANY, "config.json of the model decides"),
    (_ENGINE, "*use_distributed_optimizer", (True,), "the optimizer state is always sharded"),
    (_OVERRIDE, "use_fused_mhc", (False,), "there are no hyper-connections"),
    (_OVERRIDE, "apply_dsa_kernel_fusion dsa_*", (False, None), _NO_SPARSE),
    (_OVERRIDE, "moe_grouped_gemm", (True,), "experts are always grouped"),
    (_OVERRIDE, "moe_permutation_async_comm", (True,), "counts are always exchanged while tokens are sorted"),
    (_OVERRIDE, "moe_enable_deepep", _FLAG, "moe_token_dispatcher_type=flex is DeepEP, and nothing else is"),
    (_OVERRIDE, "use_flash_attn", (True,), _OPS),
    (_OVERRIDE, "attention_backend", ("flash", "fused", "auto"), _OPS),
    (_OVERRIDE, "moe_permute_fusion use_fused_moe_token_permute_and_unpermute", _FLAG, _OPS),
    (_OVERRIDE, "use_fused_rotary_pos_emb apply_rope_fusion use_fused_swiglu use_fused_rmsnorm", _FLAG, _OPS),
    (_OVERRIDE, "bias_activation_fusion bias_dropout_fusion masked_softmax_fusion persist_layer_norm", _FLAG, _OPS),
    (_OVERRIDE, "gradient_accumulation_fusion use_naive_l2norm", _FLAG, _OPS),
    (_OVERRIDE, "deallocate_pipeline_outputs", _FLAG, "a stage frees each output as soon as it is sent"),
    (_OVERRIDE, "attention_softmax_in_fp32", (True,), "the softmax is always computed in float32"),
    (_OVERRIDE, "variable_seq_lengths", (True,), "every stage knows the shapes of packed micro-batches"),
    (_OVERRIDE, "seq_length", _ANY, "every micro-batch brings its own length"),
    (_OPTIM, "override_optimizer_config.main_params_dtype", ("fp32",), "master weights are float32"),
    (_ROLLOUT, "do_sample", (True,), "training always samples"),
    (_ROLLOUT, "free_cache_engine enable_sleep_mode", _FLAG, "weights and cache are always freed before training"),
    (_ROLLOUT, "checkpoint_engine.* checkpoint_manager_class layer_name_map.*", _ANY, "training's groups send weights"),
    (_ROLLOUT, "agent.custom_async_server.*", (None,), "an engine takes all requests; no server runs them"),
    (_ROLLOUT, "agent.num_workers server.*", _ANY, "an engine takes all requests; no agent loop or server runs them"),
    (_ROLLOUT, "multi_turn.function_tool_path multi_turn.interaction_config_path", (None,), _NO_FUNCTIONS),
    (_ROLLOUT, "multi_turn.use_inference_chat_template multi_turn.tokenization*", _ANY, _EXACT_TOKENS),
    (_ROLLOUT, "multi_turn.num_repeat_rollouts", (None,), "actor_rollout_ref.rollout.n decides"),
    (_ROLLOUT, "engine_kwargs.sglang.* engine_kwargs.trtllm.*", _ANY, _OWN_ENGINE),
    (_VLLM, "kv_cache_dtype", ("auto", "bfloat16"), "the cache has the weights' dtype"),
    (_VLLM, "compilation_config.cudagraph_mode", _GRAPHS, "decode is captured whole, without rollout.enforce_eager"),
    (_VLLM, "compilation_config.* optimization_level swap_space all2all_backend moe_backend", _ANY, _OWN_ENGINE),
    (_VLLM, "enable_eplb eplb_config.* attention_config.* structured_outputs_config.*", _ANY, _OWN_ENGINE),
    (_VLLM, "disable_custom_all_reduce disable_cascade_attn disable_log_stats use_tqdm_on_load", _ANY, _OWN_ENGINE),
    (_ROLLOUT, "limit_images engine_kwargs.vllm.mm_* engine_kwargs.vllm.limit_mm_per_prompt", _ANY, _TEXTS),
    (_VLLM, "async_scheduling additional_config.*", _ANY, "the engine has one schedule"),
    (_ROLLOUT, "repetition_penalty", (1.0,), "training samples from the model's own distribution"),
    (_ROLLOUT, "moe_tensor_parallel_size", _ANY, "experts are whole on a rank, or split over a replica's"),
    (_ROLLOUT, "layered_summon skip_tokenizer_init multi_stage_wake_up", _FLAG, "weights and tokens travel one way"),
    (_ROLLOUT, "scheduling_policy logprobs_mode", ("fcfs", "processed_logprobs"), "the engine has one schedule"),
    (_ROLLOUT, "quantization_config_file mtp qat", (None,), "quantization decides, and config.json of the model"),
    (_ROLLOUT, "moe_load_balance_metrics_interval", _ANY, "metrics of every step have the experts' loads"),
    (_ROLLOUT, "standalone_gpu_memory_utilization", _ANY, "gpu_memory_utilization decides"),
    (_ROLLOUT, "over_sample_rate", (0,), "algorithm.filter_groups.stop_early samples more than it trains on"),
    *_absent(_ROLLOUT, "disaggregation.enabled", "prompts and answers share the engine's ranks"),
    *_absent(_ROLLOUT, "prometheus.enable", "metrics go to trainer.logger"),
    (_ROLLOUT, "trace.*", _ANY, "metrics go to trainer.logger"),
    (_ROLLOUT, "load_format", _LOAD_FORMATS, "weights always come from the trainer"),
    (_ROLLOUT, "skip_rollout", (False,), _SAVED),
    (_ROLLOUT, "skip_dump_dir", _ANY, _SAVED),
    (_ROLES, "log_prob_micro_batch_size", (None,), "use log_prob_micro_batch_size_per_gpu"),
    (_ROLLOUT, "disable_log_stats", _FLAG, "the trainer's metrics carry them"),
    (_ROLLOUT, "pipeline_model_parallel_size", (1,), "generation has no pipeline stages"),
    ("algorithm", "lam", (1.0,), "no estimator uses it"),
    ("algorithm.rollout_correction", "use_policy_gradient", (False,), "bypass_mode trains with policy_loss.loss_mode"),
    ("algorithm", "use_pf_ppo", (False,), "PF-PPO is not there"),
    ("algorithm", "pf_ppo.*", _ANY, "PF-PPO is not there"),
    ("algorithm", "filter_groups.max_inflight_gen_batches", _ANY, "generations of a step follow one another"),
    ("async_training", "use_dynamic_resource_scheduling dynamic_schedule_*", (False, None), "ranks keep their role"),
    ("async_training", "concurrent_samples_per_replica", _ANY, "actor_rollout_ref.rollout.max_num_seqs decides"),
    ("async_training", "use_trainer_do_validate", _FLAG, "the ranks that generate validate too"),
    *_absent("", "distillation.enabled", _NO_TEACHER),
    ("reward.reward_manager", "module.name", _ANY, "a module needs no name; reward.reward_manager.name is the class"),
    *_absent("reward", "reward_model.enable", _NO_REWARD_NETWORK),
    *_absent("", "*sandbox_fusion.url", "programs run in this machine's sandbox", None),
    *_absent("", "skip.*.enable", _SAVED),
    ("", "transfer_queue.*", _ANY, "rows always go from worker to worker"),
    ("ray_kwargs.ray_init", "include_dashboard log_to_driver", _FLAG, "workers print to the driver; no dashboard runs"),
    ("ray_kwargs", "timeline_json_file", (None,), "trainer.timeline_freq writes timelines"),
    *_absent("", "critic.enable", _NO_CRITIC),
    ("reward_model", "enable", (False, None), _NO_REWARD_NETWORK),
    ("reward_model", "strategy megatron.* model.* profiler.* micro_batch_size* *_token_len*", _ANY, _NO_REWARD_NETWORK),
    ("reward_model", "rollout.* enable_resource_pool n_gpus_per_node nnodes ulysses*", _ANY, _NO_REWARD_NETWORK),
    ("reward_model", "load_weight max_length nccl_timeout use_dynamic_bsz", _ANY, _NO_REWARD_NETWORK),
    ("reward_model", "launch_reward_fn_async use_reward_loop", _FLAG, "scoring runs while log-probs are computed"),
    ("trainer", "critic_warmup", (0,), _NO_CRITIC),
    ("trainer", "max_critic_ckpt_to_keep", _ANY, _NO_CRITIC),
    ("trainer", "v1.trainer_mode", ("sync",), _PLANNED),
    ("trainer", "use_v1 v1.* use_legacy_worker_impl", _ANY, _PLANNED),
    ("trainer", "rollout_data_dir validation_data_dir", _ANY, "log_samples_freq and log_val_generations decide"),
    ("trainer", "del_local_ckpt_after_load", (False,), "a run may start again from the checkpoint that it read"),
    ("trainer", "esi_redundant_time ray_wait_register_center_timeout", _ANY, "save_on_interrupt, start_timeout_s act"),
    ("trainer", "default_hdfs_dir", (None,), "checkpoints go to trainer.default_local_dir"),
    ("", "model_engine", _ENGINES, _ONE_ENGINE),
)
# dotted key or pattern -> (accepted values, what happens instead)
FIXED_KEYS = {
    f"{section}.{key}".lstrip("."): (values, why) for section, keys, values, why in _TABLE for key in keys.split()
}
# Environment variables of the published recipes' scripts, as shell patterns -> what happens instead.
FIXED_VARIABLES: dict[str, str] = {
    "VLLM_DP_SIZE": "actor_rollout_ref.rollout.data_parallel_size decides; absent means all replicas",
    "VLLM_ENABLE_GRAPH_MODE": "actor_rollout_ref.rollout.enforce_eager decides",
    "VLLM_ENABLE_FIX_ROUTE": "actor_rollout_ref.rollout.fix_router decides",
    "VLLM_ENABLE_MC2": "actor_rollout_ref.rollout.expert_exchange decides",
    "VLLM_ATTENTION_BACKEND": "trainer.rollout_ops decides which kernels run",
    "VLLM_USE_V1": "there is one engine",
    "VLLM_VERSION": "there is one engine",
    "VLLM_ASCEND_*": "there is one engine",
    "TRANSFER_QUEUE_ENABLE": "rows always go from worker to worker",
    "D2D_DATA_TRANSFER": "rows always go from worker to worker",
    "NO_ALL_TO_ALL_RESHARD": "weights always go from the ranks that train them to those that generate with them",
    "ROLLOUT_REBALANCE_ENABLE": "actor_rollout_ref.rollout.rebalance_interval decides",
    "PRINT_MEMORY": "memory is among the metrics of every step",
    "PROFILE_UPDATE": "global_profiler.steps and actor_rollout_ref.actor.profiler decide",
}


@dataclass(frozen=True)
class WithoutEffect:
    """A key that was given and changes nothing, with the reason."""

    key: str
    value: Any
    reason: str


@dataclass
class Given:
    """What was given, on its way to the typed tree."""

    values: dict[str, Any]  #: by dotted key; what is taken out is reported in one of the other two.
    taken: list[WithoutEffect] = field(default_factory=list)  #: what has no effect.
    problems: list[str] = field(default_factory=list)  #: a sentence for each value that asks for what does not happen.
    renamed: dict[str, str] = field(default_factory=dict)  #: keys that have another name now -> as they were given.
    defaults: Mapping[str, Any] = field(default_factory=dict)  #: upstream's, which nobody gave.

    def take(self, key: str, reason: str) -> None:
        """Take out a key that has no effect."""
        self.taken.append(WithoutEffect(self.renamed.get(key, key), self.values.pop(key), reason))

    def rename(self, old: str, new: str) -> None:
        """Give a key its name here; two names with different values are a problem, and an empty one gives nothing."""
        value = self.values.pop(old)
        if value is None:
            return
        if self.values.get(new) not in (None, value, self.defaults.get(new)):
            self.problems.append(
                f"{old} is {value!r} and {new} is {self.values[new]!r}, which mean the same; give one of them"
            )
            return
        self.values[new] = value
        self.renamed[new] = old


def take_fixed_keys(given: Given) -> None:
    """Take out the keys of the table."""
    for name, value in list(given.values.items()):
        fixed = next((FIXED_KEYS[pattern] for pattern in FIXED_KEYS if fnmatchcase(name, pattern)), None)
        if fixed is None:
            continue
        accepted, reason = fixed
        if accepted and value not in (*accepted, "", None):
            given.problems.append(f"{name} is {value!r}; expected {' or '.join(map(repr, accepted))} ({reason})")
        given.take(name, GIVEN_EMPTY if value in ("", None) and value not in accepted else reason)


def variables_without_effect(environment: Mapping[str, str]) -> list[WithoutEffect]:
    """The variables of the published recipes that are set in ``environment`` and change nothing here."""
    return [
        WithoutEffect(name, value, reason)
        for pattern, reason in FIXED_VARIABLES.items()
        for name, value in sorted(environment.items())
        if fnmatchcase(name, pattern)
    ]


def without_effect_block(taken: Iterable[WithoutEffect]) -> str:
    """The keys by reason, for the log at start and for a plan; empty where there are none."""
    by_reason: dict[str, list[str]] = {}
    for item in taken:
        by_reason.setdefault(item.reason, []).append(f"{item.key}={item.value}")
    lines = [f"  {', '.join(sorted(keys))}: {reason}" for reason, keys in by_reason.items()]
    return "\n".join(["taken without effect:", *lines]) if lines else ""
