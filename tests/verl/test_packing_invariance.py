"""Loss and gradient of a mini-batch do not depend on how its rows are packed, nor on the size of the micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.ops import reference_ops
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel_state import ProcessGroups
from tests.megatron.model_helpers import make_model, one_process_groups, tiny_config
from verl.protocol import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionSection
from verl.workers.actor import MegatronPPOActor
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

NUM_ROWS, PROMPT, RESPONSE = 64, 12, 40
BUDGETS = (20, 52, 256, 1000, 4000)  # tokens: many sequences are longer than the first, all fit at once in the last
SIZES = (1, 6, 32)  # rows
TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 2e-6
GSPO, CISPO = ({"policy_loss": PolicyLossConfig(mode), "clip_ratio_high": 0.05} for mode in ("gspo", "cispo"))
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo, token weights": {"correction": RolloutCorrectionSection("token", 1.02)},
    "gspo": GSPO,
    "gspo, sequences masked": GSPO
    | {"correction": RolloutCorrectionSection(rollout_rs="geometric", rollout_rs_threshold=1.01)},
    "cispo": CISPO,
    "cispo, icepop": CISPO | {"correction": RolloutCorrectionSection("token", 1.03, "token", 1.03, 0.97)},
}


def sixty_four_rows(num_prompts: int = NUM_ROWS) -> DataProto:
    """Rows of 4 to 52 tokens; advantages, old and reference log-probs as after a few updates."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, PROMPT + 1, (NUM_ROWS, 1), generator=generator)
    prompt_of_row = torch.arange(NUM_ROWS) % num_prompts
    prompts = prompts[prompt_of_row]
    responses = torch.randint(1, RESPONSE + 1, (NUM_ROWS, 1), generator=generator)
    mask = torch.cat([torch.arange(PROMPT) >= PROMPT - prompts, torch.arange(RESPONSE) < responses], dim=1).long()
    response_mask = mask[:, PROMPT:]
    noise = torch.rand(2, NUM_ROWS, RESPONSE, generator=generator)
    input_ids = torch.randint(2, 128, mask.shape, generator=generator)
    input_ids[:, :PROMPT] = input_ids[prompt_of_row, :PROMPT]
    tensors = {
        "input_ids": input_ids * mask,
        "attention_mask": mask,
        "response_mask": response_mask,
        "advantages": torch.randn(NUM_ROWS, 1, generator=generator) * response_mask,
        "old_log_probs": -4.8 - 0.3 * noise[0],
        "ref_log_prob": -4.8 - 0.3 * noise[1],
        "rollout_log_probs": -4.8 - 0.3 * noise[0] - 0.1 * (noise[1] - 0.5),
    }
    return DataProto.from_dict(tensors, meta_info={"temperature": 0.9, "rollout_n": 1, "global_step": 1})


def one_update(
    groups: ProcessGroups,
    loss_agg_mode: str,
    correction: RolloutCorrectionSection | None = None,
    num_prompts: int = NUM_ROWS,
    model: dict[str, Any] | None = None,
    **fields: Any,
) -> tuple[dict[str, float], dict]:
    """Metrics and gradients of an update that leaves the weights where they are."""
    config = ActorConfig(
        loss_agg_mode=loss_agg_mode,
        ppo_mini_batch_size=NUM_ROWS,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        entropy_coeff=0.01,
        **fields,
    )
    model_config = tiny_config(calculate_per_token_loss=True, **(model or {}))
    policy = make_model(model_config, groups)
    ddp = DistributedDataParallel(model_config, DistributedDataParallelConfig(), policy, groups)
    ops = reference_ops()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.0, clip_grad=0.0), ddp, groups, ops)
    actor = MegatronPPOActor(config, model_config, groups, ops, ddp, optimizer, None, correction)
    metrics = actor.update_policy(sixty_four_rows(num_prompts))
    assert metrics["actor/skipped_steps"] == 0.0
    biases = {name: buffer.clone() for name, buffer in policy.named_buffers() if name.endswith("expert_bias")}
    gradients = {name: weight.main_grad.clone() for name, weight in policy.named_parameters()}  # type: ignore[attr-defined]
    return metrics, gradients | biases


@pytest.fixture(scope="module")
def groups() -> Iterator[ProcessGroups]:
    with one_process_groups() as made:
        yield made


@pytest.mark.parametrize(
    "loss_agg_mode, budgets, sizes",
    [
        ("token-mean", BUDGETS, SIZES),
        ("seq-mean-token-mean", (20, 1000), (6,)),
        ("seq-mean-token-sum", (52, 1000), (6,)),
        pytest.param("seq-mean-token-mean", BUDGETS, SIZES, marks=pytest.mark.slow),
        pytest.param("seq-mean-token-sum", BUDGETS, SIZES, marks=pytest.mark.slow),
    ],
)
def test_budgets_and_sizes_of_micro_batches_agree(
    groups: ProcessGroups, loss_agg_mode: str, budgets: Sequence[int], sizes: Sequence[int]
) -> None:
    ways: list[dict[str, int | bool]] = [
        *({"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": budget} for budget in budgets),
        *({"ppo_micro_batch_size_per_gpu": size} for size in sizes),
    ]
    _assert_agree(groups, loss_agg_mode, ways, {}, abs_tolerance=0.0)


@pytest.mark.parametrize(
    "loss_agg_mode, algorithm",
    [
        ("token-mean", "ppo, token weights"),
        ("token-mean", "gspo"),
        ("token-mean", "cispo, icepop"),
        ("seq-mean-token-mean", "gspo, sequences masked"),
        ("seq-mean-token-mean", "cispo"),
    ],
)
def test_every_loss_and_correction_agrees_over_micro_batches(
    groups: ProcessGroups, loss_agg_mode: str, algorithm: str
) -> None:
    """Every algorithm with one of the two means: one and three micro-batches, and a budget of tokens."""
    _check_algorithm(groups, loss_agg_mode, algorithm, counts=(1, 3), budgets=(256,))


@pytest.mark.slow
@pytest.mark.parametrize("loss_agg_mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_loss_and_correction_agrees_over_more_micro_batches(
    groups: ProcessGroups, loss_agg_mode: str, algorithm: str
) -> None:
    """Every algorithm with both: one to four micro-batches, and three budgets of tokens."""
    _check_algorithm(groups, loss_agg_mode, algorithm, counts=(1, 2, 3, 4), budgets=(52, 256, 1000))


@pytest.mark.parametrize("model", [{}, {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}])
def test_prompts_that_are_computed_once_change_nothing(groups: ProcessGroups, model: dict[str, Any]) -> None:
    """Loss, gradients and the experts' biases of 16 prompts with four samples each, of which a micro-batch has some."""
    ways: list[dict[str, int | bool]] = [
        {"ppo_micro_batch_size_per_gpu": NUM_ROWS},
        {"ppo_micro_batch_size_per_gpu": NUM_ROWS, "share_prompts": "true"},
        {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 256, "share_prompts": "true"},
    ]
    _assert_agree(groups, "token-mean", ways, {"num_prompts": 16, "model": model}, abs_tolerance=1e-7)


def _check_algorithm(
    groups: ProcessGroups, loss_agg_mode: str, algorithm: str, counts: Sequence[int], budgets: Sequence[int]
) -> None:
    ways: list[dict[str, int | bool]] = [
        *({"ppo_micro_batch_size_per_gpu": -(-NUM_ROWS // count)} for count in counts),
        *({"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": budget} for budget in budgets),
    ]
    _assert_agree(groups, loss_agg_mode, ways, ALGORITHMS[algorithm], abs_tolerance=1e-6)  # losses that nearly cancel


def _assert_agree(
    groups: ProcessGroups,
    loss_agg_mode: str,
    ways: list[dict[str, int | bool]],
    algorithm: dict[str, Any],
    abs_tolerance: float,
) -> None:
    expected, expected_gradients = one_update(groups, loss_agg_mode, **algorithm, **ways[0])
    for way in ways[1:]:
        metrics, gradients = one_update(groups, loss_agg_mode, **algorithm, **way)
        drafts = [name for name in expected if name.startswith("actor/mtp_")]
        for name in ("actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm", *drafts):
            assert metrics[name] == pytest.approx(expected[name], rel=TOLERANCE, abs=abs_tolerance), (way, name)
        for name, gradient in gradients.items():
            distance = (gradient - expected_gradients[name]).norm() / expected_gradients[name].norm()
            assert distance <= GRADIENT_TOLERANCE, (way, name, float(distance))
