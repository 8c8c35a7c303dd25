"""The exact mode: rollout's log-probabilities are those of the actor's scoring pass, bit for bit, however both go."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_formats.config import load_hf_config
from megatron.core.models.gpt import GPTModel
from megatron.core.ops import resolve
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ProcessGroups
from mindspeed_llm.export_weights import export_weights
from mindspeed_llm.hf_checkpoint import HFCheckpoint
from mindspeed_llm.load_weights import load_weights
from mindspeed_llm.model import build_model
from mindspeed_llm.weight_plan import local_plan
from recipes.common.tiny_models import DEEPSEEK_V3 as TINY_DEEPSEEK
from tests.compiler import needs_compiler
from tests.megatron.model_helpers import one_process_groups
from tests.mindspeed_llm.tiny import tiny_hf_config, write_tiny_checkpoint
from tests.parallel.launcher import run_ranks
from tests.parallel.test_grpo_step import ENGINE, config_overrides
from tests.parallel.test_grpo_step import prompts as worker_prompts
from tests.tiny_models import CONFIGS, PLAIN
from tests.vllm.tiny import write_checkpoint
from verl.protocol import DataProto
from verl.trainer.config import load_config, validate_config
from verl.trainer.config.checks import exact_problems
from verl.utils.device import EXACT_OPS, ops_providers
from verl.workers.actor import MegatronPPOActor
from verl.workers.config import ActorConfig
from verl.workers.megatron_workers import ActorRolloutRefWorker
from verl.workers.row_store import worker_batch
from vllm import LLM, RequestOutput, SamplingParams

PROMPT, RESPONSE = 120, 40
TRAIN_OPS, ROLLOUT_OPS = EXACT_OPS
EXACT = ["trainer.exact_log_probs=True", "actor_rollout_ref.rollout.expert_exchange=dispatch"]
# How the rollout engine may come to the same tokens.
WAYS: dict[str, dict[str, Any]] = {
    "all at once": {"max_num_seqs": 64},
    "one by one": {"max_num_seqs": 1},
    "chunks of 7 tokens": {"max_num_seqs": 7, "max_num_batched_tokens": 7},
    "preempted": {"max_num_seqs": 16, "block_size": 4, "num_gpu_blocks_override": 44},
    "cached prefixes": {"max_num_seqs": 8, "enable_prefix_caching": True},
}


@pytest.fixture(scope="module")
def groups() -> Iterator[ProcessGroups]:
    with one_process_groups() as made:
        yield made


def make_llm(path: str, provider: str = ROLLOUT_OPS, **changes: Any) -> LLM:
    return LLM(path, skip_tokenizer_init=True, max_model_len=PROMPT + RESPONSE, rollout_ops=provider, **changes)


def make_prompts(count: int, vocab_size: int = 512) -> list[Any]:
    """Of 1 to PROMPT tokens; every other one begins with the same 40."""
    rng = random.Random(5)
    shared = [rng.randrange(3, vocab_size) for _ in range(40)]
    own = [[rng.randrange(3, vocab_size) for _ in range(rng.randint(1, PROMPT - 40))] for _ in range(count)]
    return [{"prompt_token_ids": (shared if i % 2 else []) + ids} for i, ids in enumerate(own)]


def as_batch(outputs: list[RequestOutput], temperature: float) -> DataProto:
    """verl's batch of the samples: prompts padded on the left, responses on the right."""
    samples = [(o.prompt_token_ids, c) for o in outputs for c in o.outputs]
    ids = torch.zeros(len(samples), PROMPT + RESPONSE, dtype=torch.int64)
    mask, log_probs = torch.zeros_like(ids), torch.zeros(len(samples), RESPONSE)
    for row, (prompt, completion) in enumerate(samples):
        tokens = prompt + completion.token_ids
        start, length = PROMPT - len(prompt), len(completion.token_ids)
        ids[row, start : start + len(tokens)] = torch.tensor(tokens)
        mask[row, start : start + len(tokens)] = 1
        log_probs[row, :length] = torch.tensor(completion.sampled_logprobs)
    tensors = {
        "input_ids": ids,
        "attention_mask": mask,
        "response_mask": mask[:, PROMPT:],
        "rollout_log_probs": log_probs,
    }
    return DataProto.from_dict(tensors, meta_info={"temperature": temperature})


def make_actor(path: str, groups: ProcessGroups, dtype: torch.dtype, provider: str = TRAIN_OPS) -> MegatronPPOActor:
    hf, ops = load_hf_config(path), resolve(provider)
    model = build_model(hf, groups, ops, params_dtype=dtype)
    assert isinstance(model, GPTModel)
    load_weights(model, local_plan(hf, groups.layout, groups.rank), HFCheckpoint(path))
    return MegatronPPOActor(ActorConfig(), model.config, groups, ops, model)


def differences(batch: DataProto, log_probs: torch.Tensor | None) -> float:
    """Largest difference of rollout's log-probs from the actor's."""
    assert log_probs is not None
    assert int(batch.batch["response_mask"].sum()) > 0
    return float(((log_probs - batch.batch["rollout_log_probs"]) * batch.batch["response_mask"]).abs().max())


def test_every_way_through_both_engines_gives_the_same_bits(groups: ProcessGroups, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, **TINY_DEEPSEEK.config | {"torch_dtype": "float32"})
    params = SamplingParams(n=2, max_tokens=8, temperature=0.8, seed=3, logprobs=0)
    actor = make_actor(path, groups, torch.float32)
    first = None
    for name, settings in WAYS.items():
        llm = make_llm(path, **settings)
        batch = as_batch(llm.generate(make_prompts(8), params), 0.8)
        assert (llm.core.scheduler.num_preemptions > 0) == (name == "preempted")
        first = first or batch
        for key in ("input_ids", "rollout_log_probs"):
            assert torch.equal(batch.batch[key], first.batch[key]), (name, key)
    assert first is not None
    plain = as_batch(make_llm(path, "vllm.ops.reference:rollout_ops").generate(make_prompts(8), params), 0.8)
    assert torch.equal(first.batch["input_ids"], plain.batch["input_ids"])
    torch.testing.assert_close(first.batch["rollout_log_probs"], plain.batch["rollout_log_probs"], atol=2e-5, rtol=0)
    packings: list[dict[str, int]] = [{"max_token_len": 170}, {"max_token_len": 4000}, {"micro_batch_size": 3}]
    for packing in packings:
        assert differences(first, actor.compute_log_prob(first, **packing)) == 0.0


@pytest.mark.slow
def test_512_samples_of_the_recipe_differ_by_zero(groups: ProcessGroups, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, **TINY_DEEPSEEK.config | {"torch_dtype": "float32"})
    params = SamplingParams(n=8, max_tokens=RESPONSE, temperature=0.8, seed=3, logprobs=0)
    outputs = make_llm(path, max_num_seqs=64, max_num_batched_tokens=300).generate(make_prompts(64), params)
    batch = as_batch(outputs, 0.8)
    assert len(batch) == 512
    actor = make_actor(path, groups, torch.float32)
    for budget in (400, 8192):
        assert differences(batch, actor.compute_log_prob(batch, max_token_len=budget)) == 0.0


@pytest.mark.parametrize("model", ["deepseek-v2-lite", "moonlight", *PLAIN])
def test_other_models_differ_by_zero(groups: ProcessGroups, tmp_path: Path, model: str) -> None:
    config = CONFIGS[model]
    write_tiny_checkpoint(tmp_path, config, seed=1, dtype=torch.float32)
    prompts = make_prompts(5, config["vocab_size"])
    llm = make_llm(str(tmp_path), max_num_seqs=5, max_num_batched_tokens=64)
    batch = as_batch(llm.generate(prompts, SamplingParams(n=2, max_tokens=5, seed=3, logprobs=0)), 1.0)
    actor = make_actor(str(tmp_path), groups, torch.float32)
    assert differences(batch, actor.compute_log_prob(batch, max_token_len=1000)) == 0.0


def test_bfloat16_differs_by_zero(groups: ProcessGroups, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, **TINY_DEEPSEEK.config)
    actor = make_actor(path, groups, torch.bfloat16)
    llm = make_llm(path, dtype="bfloat16", max_num_seqs=5, max_num_batched_tokens=64)
    assert isinstance(actor.actor_module, GPTModel)
    llm.load_weights(export_weights(actor.actor_module, load_hf_config(path), groups))
    batch = as_batch(llm.generate(make_prompts(8), SamplingParams(n=2, max_tokens=8, seed=3, logprobs=0)), 1.0)
    assert differences(batch, actor.compute_log_prob(batch, max_token_len=1000)) == 0.0


def scored_worker(model_dir: str) -> tuple[float, float]:
    """Largest and summed difference of one rank's rows, through verl's worker with experts on two ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    overrides = [*config_overrides(model_dir, world_size), *EXACT, "data.max_response_length=20"]
    config = load_config([*overrides, f"{ENGINE}.expert_model_parallel_size=2"])
    assert validate_config(config) == []
    worker = ActorRolloutRefWorker(config, "actor_rollout_ref")
    names = worker.init_model()
    assert names["training"]["matmul"] == names["rollout"]["linear"] == "exact"
    batch = worker.generate_sequences(worker_prompts().chunk(world_size)[rank])
    batch.meta_info |= {"temperature": 1.0, "rollout_n": 2, "global_step": 1}
    batch = batch.union(worker.compute_log_prob(worker_batch(batch)))
    rows = worker.row_store.fetch(batch, ("old_log_probs", "rollout_log_probs", "response_mask")).batch
    gap = (rows["old_log_probs"] - rows["rollout_log_probs"]).abs() * rows["response_mask"]
    return float(gap.max()), float(batch.batch["response_mask"].sum())


@pytest.mark.timeout(120)
def test_the_worker_with_experts_on_two_ranks_differs_by_zero(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_hf_config(), seed=1, dtype=torch.float32)
    for gap, num_tokens in run_ranks(scored_worker, 2, str(tmp_path)):
        assert gap == 0.0
        assert num_tokens > 20


@needs_compiler
def test_gradients_are_those_of_the_reference(groups: ProcessGroups, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, **TINY_DEEPSEEK.config | {"torch_dtype": "float32"})
    generator = torch.Generator().manual_seed(2)
    lengths = [70, 3, 33, 1]
    ids, labels = torch.randint(3, 512, (2, sum(lengths)), generator=generator)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(n) for n in lengths])
    gradients = []
    for provider in ("megatron.core.ops.reference:reference_ops", TRAIN_OPS):
        model = make_actor(path, groups, torch.float32, provider).actor_module
        model(ids, positions, PackedSeqParams(bounds, max(lengths)), labels).sum().backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    expected, found = gradients
    for name, gradient in expected.items():
        assert gradient is not None and found[name] is not None, name
        largest = float(gradient.abs().max())
        assert float((found[name] - gradient).abs().max()) <= 1e-5 * max(largest, 1e-3), name


def test_settings_that_would_round_differently_are_refused_together() -> None:
    config = load_config(
        [
            "trainer.exact_log_probs=True",
            "trainer.device=npu",
            "trainer.n_gpus_per_node=2",
            "trainer.train_ops=mine:table",
            f"{ENGINE}.tensor_model_parallel_size=2",
            "actor_rollout_ref.rollout.dtype=float32",
        ]
    )
    problems = "\n".join(exact_problems(config))
    for key in (
        "trainer.device is 'npu'",
        "trainer.train_ops is 'mine:table'",
        f"{ENGINE}.tensor_model_parallel_size is 2",
        "actor_rollout_ref.rollout.dtype is 'float32'",
        "actor_rollout_ref.rollout.expert_exchange is 'all_gather'",
    ):
        assert key in problems
    with pytest.raises(ValueError, match=r"trainer\.device=cpu"):
        ops_providers(config.trainer, "cuda")


def test_the_recipe_is_exact_with_two_keys() -> None:
    folder = Path(__file__).resolve().parents[2] / "recipes" / "r1_zero" / "config"
    given = ["actor_rollout_ref.actor.megatron.dist_checkpointing_path=/checkpoint", *EXACT]
    config = load_config(given, config_name="r1_zero_tiny", config_dir=folder)
    assert validate_config(config) == []
    assert ops_providers(config.trainer, "cpu") == EXACT_OPS
