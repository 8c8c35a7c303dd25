"""Layouts of 1 to 8 processes on which plans are held against runs."""

from __future__ import annotations

from typing import Any

ENGINE = "actor_rollout_ref.actor.megatron"
FIELDS = f"{ENGINE}.override_transformer_config"
BALANCED = [f"{ENGINE}.fix_router=true", "actor_rollout_ref.rollout.fix_router=true", "trainer.hang_timeout_s=0"]
OVERLAP = [
    f"{ENGINE}.override_ddp_config.overlap_grad_reduce=true",
    f"{ENGINE}.override_ddp_config.overlap_param_gather=true",
]
EXTENDED = [
    f"{ENGINE}.tensor_model_parallel_size=2",
    f"{ENGINE}.expert_model_parallel_size=2",
    f"{ENGINE}.moe_tp_extend_ep=true",
]
RECOMPUTE = [
    f"{FIELDS}.recompute_granularity=full",
    f"{FIELDS}.recompute_method=block",
    f"{FIELDS}.recompute_num_layers=1",
]

# name -> (processes, overrides); the model has 4 layers, the first of them dense.
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "dp2": (2, []),
    "dp2_overlap": (2, OVERLAP),
    "tp2": (2, [f"{ENGINE}.tensor_model_parallel_size=2"]),
    "pp2": (2, [f"{ENGINE}.pipeline_model_parallel_size=2", "actor_rollout_ref.actor.router_replay.mode=R2"]),
    "ep2": (2, [f"{ENGINE}.expert_model_parallel_size=2"]),
    "cp2": (2, [f"{ENGINE}.context_parallel_size=2", "actor_rollout_ref.actor.router_replay.mode=R2"]),
    "tp2_etp2": (2, [f"{ENGINE}.tensor_model_parallel_size=2", f"{ENGINE}.expert_tensor_parallel_size=2"]),
    "tp2_ep2_extended": (4, EXTENDED),
    "tp2_ep2_extended_recompute": (4, [*EXTENDED, *RECOMPUTE]),
    "tp2_pp2_uneven_ep2": (
        4,
        [
            f"{ENGINE}.tensor_model_parallel_size=2",
            f"{ENGINE}.pipeline_model_parallel_size=2",
            f"{ENGINE}.num_layer_list=[1,3]",
            f"{ENGINE}.swap_optimizer=true",
            f"{ENGINE}.optimizer_offload=false",
        ],
    ),
    "cp2_pp2_vpp2": (
        4,
        [
            f"{ENGINE}.context_parallel_size=2",
            f"{ENGINE}.pipeline_model_parallel_size=2",
            f"{ENGINE}.virtual_pipeline_model_parallel_size=2",
            f"{ENGINE}.expert_model_parallel_size=2",
        ],
    ),
    "tp2_pp2_dp2_ep4_recompute": (8, [*EXTENDED, f"{ENGINE}.pipeline_model_parallel_size=2", *RECOMPUTE]),
    "pp4_ep2_overlap": (
        8,
        [
            f"{ENGINE}.pipeline_model_parallel_size=4",
            f"{ENGINE}.expert_model_parallel_size=2",
            *OVERLAP,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        ],
    ),
}


def overrides_of(model_dir: str, world_size: int, *more: str) -> list[str]:
    """The overrides of a run of 8 prompts of 10 tokens, two samples of 8 tokens each."""
    base: dict[str, Any] = {
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": world_size,
        "trainer.report_dir": f"{model_dir}/run",
        "actor_rollout_ref.model.path": model_dir,
        "data.max_prompt_length": 10,
        "data.max_response_length": 8,
        "data.train_batch_size": 8,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2,
        "actor_rollout_ref.actor.use_kl_loss": "true",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 2,
        f"{ENGINE}.dtype": "float32",
        f"{ENGINE}.param_offload": "true",
        f"{ENGINE}.grad_offload": "true",
        f"{ENGINE}.optimizer_offload": "true",
        "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.enforce_eager": "true",
        "actor_rollout_ref.rollout.ignore_eos": "true",
        "actor_rollout_ref.rollout.max_num_seqs": 8,
        "actor_rollout_ref.rollout.num_gpu_blocks_override": 64,
    }
    return [*(f"{key}={value}" for key, value in base.items()), *BALANCED, *more]
