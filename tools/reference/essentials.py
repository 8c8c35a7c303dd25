"""The keys that a user touches, and when."""

from __future__ import annotations

# key -> when to touch it; what it does is in the config's own docstrings
ESSENTIALS: dict[str, str] = {
    "data.train_files": "always: your training rows",
    "data.val_files": "always: your evaluation sets",
    "data.train_batch_size": "more prompts per step for a steadier gradient, fewer for faster steps",
    "data.max_prompt_length": "your prompts are longer",
    "data.max_response_length": "responses are cut (`response_length/clip_ratio` is high), or memory is short",
    "actor_rollout_ref.model.path": "always: the model to start from",
    "actor_rollout_ref.model.external_lib": "you bring an estimator, a loss or a reward manager of your own",
    "custom_reward_function.path": "always, but for code problems: the function that grades answers",
    "algorithm.adv_estimator": "you want another algorithm than GRPO",
    "actor_rollout_ref.rollout.n": "larger groups give GRPO a better baseline and cost generation time",
    "actor_rollout_ref.actor.optim.lr": "the reward does not move, or the policy collapses",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "several updates per batch (off-policy), or exactly one",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "an update runs out of memory, or leaves much of it free",
    "actor_rollout_ref.actor.use_dynamic_bsz": "responses differ much in length",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "with `use_dynamic_bsz`, as the micro-batch size without",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "you want GSPO, CISPO or a loss of your own",
    "actor_rollout_ref.actor.use_kl_loss": "the policy drifts from the reference",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "layers or activations do not fit on one device",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": "the model does not fit with TP alone",
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size": "the experts do not fit",
    "actor_rollout_ref.actor.megatron.param_offload": "generation runs out of memory beside the training state",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "the rollout's weights do not fit on one device",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "generation runs out of memory, or its cache is too small",
    "actor_rollout_ref.rollout.max_num_seqs": "more sequences at once for throughput, as far as the cache has room",
    "trainer.nnodes": "the run has several hosts",
    "trainer.n_gpus_per_node": "your hosts have another number of devices",
    "trainer.schedule": "generation should run beside training",
    "trainer.total_epochs": "a longer or shorter run",
    "trainer.save_freq": "how much work a failure may cost",
    "trainer.test_freq": "how often you want to see the validation score",
}
