"""A whole GRPO step in one recording is its plan: every collective of every rank, entry by entry, and every phase.

The trainer's own step: weight sync, generation, old log-probs, reference, rewards and advantages, update. Its ranks are
gloo processes; what each did from the first call to the last is held against the phases of its plan, joined in order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recipes.common.tokenizer import write_tokenizer
from tests.mindspeed_llm.tiny import tiny_hf_config, write_tiny_checkpoint
from tests.tiny_models import CONFIGS
from tests.tools.plan.trained_step import RankStep, train_a_step
from tests.tools.plan.truth_layouts import LAYOUTS, overrides_of
from tools.plan.collectives import Collective
from tools.plan.devices import load_device
from tools.plan.phase_calls import PhaseCalls
from tools.plan.rank_plan import RankPlan, plan_rank
from tools.plan.training import StepSize
from verl.trainer.config import PPOTrainerConfig, load_config, validate_config
from verl.trainer.config.override_text import override
from verl.utils.dataset import RLHFDataset
from verl.utils.tokenizer import hf_tokenizer

# A step joins the phases in the same way in every layout; test_training_truth has the training of the others, and
# test_rollout_truth their generation.
QUICK = ("pp2",)
RESPONSE = 4
VOCABULARY = 300
PLANNED_ONLY = {"decode", "prefill", "save"}
ONE_STEP = (
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    f"data.max_response_length={RESPONSE}",
    "actor_rollout_ref.actor.recompute_old_log_prob=True",
    "actor_rollout_ref.rollout.enable_prefix_caching=false",  # all rows of a step are as long
    "actor_rollout_ref.rollout.max_num_seqs=16",
    "actor_rollout_ref.rollout.max_num_batched_tokens=256",
    "reward_model.num_workers=1",
    "trainer.total_training_steps=1",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.test_last=false",
    "trainer.save_freq=-1",
    "trainer.save_last=false",
    "trainer.export_hf=false",
    "trainer.resume_mode=disable",
    "trainer.logger=[console]",
)

BESIDE = (
    "trainer.schedule=one_step_off",
    "actor_rollout_ref.hybrid_engine=false",
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=2",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"), tiny_hf_config())


def write_inputs(root: Path, config: dict[str, Any]) -> Path:
    """A model with a tokenizer, prompts of one length, and a grader."""
    config = config | {"num_hidden_layers": 4, "vocab_size": VOCABULARY + 4}
    write_tiny_checkpoint(root / "model", config, seed=1, dtype=torch.float32)
    write_tokenizer([f"digit {i}" for i in range(10)], root / "model", VOCABULARY, 64)
    row = {"data_source": "digits", "reward_model": {"ground_truth": "7"}, "extra_info": {"index": 0}}
    rows = [{**row, "prompt": [{"role": "user", "content": f"digit {i}"}]} for i in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), root / "data.parquet")
    return root


def step_config(inputs: Path, report_dir: Path, layout: str, *more: str) -> PPOTrainerConfig:
    world_size, overrides = LAYOUTS[layout]
    given = [
        *overrides_of(str(inputs / "model"), world_size, *overrides),
        *ONE_STEP,
        override("data.train_files", inputs / "data.parquet"),
        override("data.val_files", inputs / "data.parquet"),
        override("custom_reward_function.path", Path(__file__).parents[2] / "verl" / "rewards_for_tests.py"),
        override("trainer.report_dir", report_dir),
        override("trainer.default_local_dir", report_dir / "checkpoints"),
        *more,
    ]
    config = load_config(given)
    assert validate_config(config) == []
    return config


def prompt_length(config: PPOTrainerConfig) -> int:
    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
    dataset = RLHFDataset([config.data.train_files], tokenizer, config.data)
    (length,) = {len(dataset[row]["raw_prompt_ids"]) for row in range(len(dataset))}
    return length


def whole(calls: PhaseCalls) -> list[Collective]:
    """Every call of a phase that was planned whole, or of equal steps."""
    sample = calls.samples[0]
    assert sample or not calls.count
    return list(sample) * (calls.count // max(1, len(sample)))


def planned_phases(plan: RankPlan) -> list[str]:
    """Names of the plan's phases in the order of their ends, without those that no timeline has."""
    return [phase.name for phase in plan.phases if phase.name not in PLANNED_ONLY]


@pytest.mark.parametrize(
    "layout", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_a_step_is_its_plan(layout: str, inputs: Path, tmp_path: Path) -> None:
    check_step(step_config(inputs, tmp_path, layout))


@pytest.mark.slow  # test_training_truth.py and test_rollout_truth.py have its halves
@pytest.mark.parametrize("layout", ["ep2", "tp2_etp2", "tp2_pp2_uneven_ep2"])
def test_a_step_of_experts_with_grouped_queries(layout: str, tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path / "inputs", CONFIGS["qwen3-moe"])
    check_step(step_config(inputs, tmp_path / "run", layout))


def test_a_step_beside_ranks_that_generate_is_its_plan(inputs: Path, tmp_path: Path) -> None:
    """Ranks that train make their plan's calls; those that generate begin with theirs, and then run ahead."""
    config = step_config(inputs, tmp_path, "ep2", *BESIDE)
    did, num_training = train_a_step(config), config.trainer.world_size
    assert len(did) == config.num_devices == num_training + 2
    check_ranks(config, did[:num_training])
    for rank, (calls, _) in enumerate(did[num_training:], num_training):
        plan = plan_rank(config, load_device("cpu"), rank, StepSize(prompt_length(config), RESPONSE))
        (sync, prefill), made = (whole(phase) for phase in plan.calls[:2]), iter(calls)
        assert [phase.phase for phase in plan.calls] == ["weight_sync", "prefill", "decode", "generate_end"]
        assert calls[: len(sync)] == sync and calls[len(sync) : len(sync) + len(prefill)] == prefill
        assert all(call in made for call in whole(plan.calls[2])), "decode steps, in their order"


def check_step(config: PPOTrainerConfig) -> None:
    check_ranks(config, train_a_step(config))


def check_ranks(config: PPOTrainerConfig, did: list[RankStep]) -> None:
    size = StepSize(prompt_length(config), RESPONSE)
    for rank, (calls, spans) in enumerate(did):
        plan = plan_rank(config, load_device("cpu"), rank, size)
        expected = [(phase.phase, call) for phase in plan.calls for call in whole(phase)]
        for place, (call, (phase, planned)) in enumerate(zip(calls, expected, strict=False)):
            assert call == planned, f"rank {rank}, call {place} of {len(calls)}, in {phase}"
        assert len(calls) == len(expected) == sum(phase.count for phase in plan.calls), f"rank {rank}"
        order = planned_phases(plan)
        assert [name for name in spans if name in order] == order, f"rank {rank}"
