"""Keys of the engines are more than read: another value makes another engine, optimizer, layout or sampling."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_formats.config import load_hf_config
from tests.mindspeed_llm.tiny import tiny_hf_config
from tests.verl.composed import composed
from verl.trainer.config import PPOTrainerConfig, load_config
from verl.trainer.config.declared import declared_keys
from verl.trainer.config.load import typed_config
from verl.workers.config import overrides
from verl.workers.engine_setup import ddp_config, model_fields, optimizer_config, trained_model
from verl.workers.rollout.vllm_rollout import vllm_rollout_spmd
from vllm.engine.arg_utils import EngineArgs

ROOT = Path(__file__).resolve().parents[2]
MODELS = "actor_rollout_ref"
ENGINE, OPTIM, ROLLOUT = f"{MODELS}.actor.megatron", f"{MODELS}.actor.optim", f"{MODELS}.rollout"
TRANSFORMER, STATE = f"{ENGINE}.override_transformer_config", f"{OPTIM}.override_optimizer_config"
# Values where another number, or the opposite, would not do.
VALUES = {
    f"{ENGINE}.num_layer_list": "[2,1]",
    f"{ENGINE}.dtype": "float32",
    f"{ROLLOUT}.dtype": "float32",
    f"{ROLLOUT}.quantization": "fp8",
    f"{ROLLOUT}.kv_cache_layout": "nz",
    f"{ROLLOUT}.expert_exchange": "dispatch",
    f"{ROLLOUT}.cudagraph_capture_sizes": "[4]",
    f"{ROLLOUT}.speculative_config": "{method:ngram,num_speculative_tokens:2}",
    f"{ROLLOUT}.gpu_memory_utilization": "0.7",
    f"{ROLLOUT}.top_p": "0.7",
    f"{ROLLOUT}.val_kwargs.top_p": "0.7",
    f"{OPTIM}.betas": "[0.8,0.9]",
    f"{OPTIM}.lr_decay_style": "cosine",
    f"{TRANSFORMER}.pipeline_num_transformer_layers": "[[2],[1]]",
    f"{TRANSFORMER}.noop_layers": "[1]",
    f"{TRANSFORMER}.recompute_granularity": "selective",
    f"{TRANSFORMER}.recompute_method": "block",
    f"{TRANSFORMER}.recompute_modules": "[mlp]",
    f"{TRANSFORMER}.cp_comm_type": "a2a",
    f"{TRANSFORMER}.moe_router_load_balancing_type": "seq_aux_loss",
    f"{TRANSFORMER}.moe_router_dtype": "fp64",
    f"{TRANSFORMER}.moe_token_dispatcher_type": "allgather",
    f"{STATE}.main_grads_dtype": "bf16",
    f"{STATE}.exp_avg_dtype": "bf16",
    f"{STATE}.exp_avg_sq_dtype": "bf16",
    f"{STATE}.on_non_finite_grads": "stop",
    f"{STATE}.optimizer_offload_fraction": "0.5",
    f"{OPTIM}.min_lr": "1e-7",
    f"{OPTIM}.lr_warmup_steps": "3",
    f"{ENGINE}.override_ddp_config.grad_reduce_in_fp32": "False",
    **dict.fromkeys((f"{STATE}.pin_cpu_grads", f"{STATE}.pin_cpu_params"), "False"),
}
# What must be there for the key to be possible.
WITH = {
    f"{TRANSFORMER}.recompute_method": (f"{TRANSFORMER}.recompute_granularity=full",),
    f"{TRANSFORMER}.recompute_num_layers": (f"{TRANSFORMER}.recompute_granularity=full",),
    f"{ENGINE}.moe_tp_extend_ep": (f"{ENGINE}.tensor_model_parallel_size=2",),
    f"{ROLLOUT}.val_kwargs.do_sample": (f"{ROLLOUT}.val_kwargs.temperature=1",),
    f"{ROLLOUT}.val_kwargs.temperature": (f"{ROLLOUT}.val_kwargs.do_sample=True",),
    f"{ROLLOUT}.val_kwargs.top": (f"{ROLLOUT}.val_kwargs.do_sample=True", f"{ROLLOUT}.val_kwargs.temperature=1"),
    f"{ROLLOUT}.expert_exchange": (f"{ROLLOUT}.enable_expert_parallel=True",),
    f"{ROLLOUT}.use_sequence_parallel_moe": (f"{ROLLOUT}.expert_exchange=dispatch",),
    f"{STATE}.": (
        f"{STATE}.use_precision_aware_optimizer=True",
        f"{STATE}.optimizer_cpu_offload=True",
        f"{OPTIM}.betas=[0.9,0.98]",
    ),
}
# Keys that act in the worker and the trainer themselves; the tests that show it.
ELSEWHERE = {
    **dict.fromkeys(("param_offload", "grad_offload", "optimizer_offload"), "tests/npu/test_training_memory.py"),
    **dict.fromkeys(("use_dist_checkpointing", "dist_checkpointing_path"), "tests/verl/test_start_weights.py"),
    **dict.fromkeys(("load_weight", "seed"), "tests/verl/test_start_weights.py"),
    "sequence_parallel": "tests/verl/test_accepted_keys.py",  # one value
    "mtp_num_layers": "tests/megatron/test_mtp.py",
    **dict.fromkeys(("name", "mode"), "tests/verl/test_accepted_keys.py"),  # one value
    **dict.fromkeys(("n", "prompt_length", "calculate_log_probs"), "tests/verl/test_trainer.py"),
    **dict.fromkeys(
        (f"log_prob_{key}" for key in ("micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")),
        "tests/verl/test_packing_invariance.py",
    ),
    "update_weights_bucket_megabytes": "tests/verl/test_weight_sync.py",
    **dict.fromkeys(("agent_loop_config_path", "default_agent_loop"), "tests/verl/test_agent_loops.py"),
    "fit_layout": "tests/verl/test_verl_0_9_scripts.py",
    "also_greedy": "tests/verl/test_validation.py",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(tiny_hf_config()))
    return folder


def engines_of(config: PPOTrainerConfig) -> dict[str, Any]:
    """What the workers would build their engines with."""
    models = config.actor_rollout_ref
    actor, rollout, hf = models.actor, models.rollout, load_hf_config(models.model.path)
    engine = SimpleNamespace(
        config=SimpleNamespace(model=SimpleNamespace(max_model_len=rollout.context_length)),
        engine=SimpleNamespace(processor=SimpleNamespace(end_token_ids=hf.eos_token_ids)),
    )
    sampler: Any = SimpleNamespace(config=rollout, inference_engine=engine)  # the method reads nothing else
    metas: list[dict[str, Any]] = [{"eos_token_id": 1, "validate": validate} for validate in (False, True)]
    return {
        "layout": actor.megatron.layout(8),
        "model": model_fields(models, actor.megatron),
        "trained": trained_model(hf, actor.megatron),
        "ddp": ddp_config(actor.megatron),
        "optimizer": (actor.megatron.optimizer_provider, optimizer_config(actor.optim, actor.megatron)),
        "ops": actor.megatron.op_choices,
        "schedule": (
            actor.optim.warmup_steps(100),
            actor.optim.decay_steps(100),
            actor.optim.lr_warmup_init,
            actor.optim.lr_decay_style,
        ),
        "rollout": EngineArgs(**vllm_rollout_spmd._engine_arguments(rollout, models.model.path, 8)),
        "sampling": [repr(vllm_rollout_spmd.vLLMRollout.request(sampler, "0", [2], 0, 0, meta)) for meta in metas],
    }


def _another(key: str, default: Any) -> str:
    if key in VALUES:
        return VALUES[key]
    if isinstance(default, bool):
        return str(not default)
    if isinstance(default, int | float):
        return str(default + 1)
    return "2"


def _keys() -> dict[str, Any]:
    """Every key of the engines' sections with its default, and every key of their free sections.

    Those of turns act beside the engine: ``test_turns.py``, ``test_environment_pool.py`` and ``test_tools.py``.
    """
    plain = dataclasses.asdict(load_config())
    found: dict[str, Any] = {}
    for key in declared_keys():
        if key.startswith((f"{ENGINE}.", f"{OPTIM}.", f"{ROLLOUT}.")) and not set(key.split(".")) & {
            "profiler",
            "multi_turn",
        }:
            value: Any = plain
            for part in key.split("."):
                value = value[part]
            if not isinstance(value, dict):
                found[key] = value
    for section, known in (
        (TRANSFORMER, overrides.TRANSFORMER_OVERRIDES),
        (f"{ENGINE}.override_ddp_config", overrides.DDP_OVERRIDES),
        (STATE, overrides.OPTIMIZER_OVERRIDES),
    ):
        found |= {f"{section}.{key}": False if values.checks[0].accepts(True) else 1 for key, values in known.items()}
    return found


def test_another_value_makes_another_engine(model: Path) -> None:
    base = f"{MODELS}.model.path={model}"
    silent, unchanged = [], dict[tuple[str, ...], dict[str, Any]]()
    compared = 0
    for key, default in _keys().items():
        if key.rpartition(".")[2] in ELSEWHERE and key not in VALUES:
            continue
        needed = next((given for start, given in WITH.items() if key.startswith(start)), ())
        given = [base, *(text for text in needed if not text.startswith(f"{key}="))]
        changed = f"{key}={_another(key, default)}"
        compared += 1
        if tuple(given) not in unchanged:
            unchanged[tuple(given)] = engines_of(typed_config(composed(*given)))
        if unchanged[tuple(given)] == engines_of(typed_config(composed(*given, changed))):
            silent.append(changed)
    assert silent == [] and compared > 90
    assert all((ROOT / path).is_file() for path in ELSEWHERE.values())
