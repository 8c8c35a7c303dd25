"""How many drafts a step verifies is a function of batch size, acceptance and costs alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parallel.launcher import run_ranks
from tests.vllm.tiny import TINY, write_checkpoint
from vllm import LLM, SamplingParams
from vllm.v1.spec_decode.draft_length import Acceptance, StepCosts, interpolated, num_worthwhile, num_worthwhile_passes

MEMORY_BOUND = StepCosts(np.ones(65), np.ones(65), np.zeros(65), np.full(65, 0.01))
COMPUTE_BOUND = StepCosts(*(np.arange(65) * share for share in (1.0, 1.0, 1.0, 0.1)))


def test_all_drafts_pay_where_rows_are_free_and_none_where_each_costs_as_much_as_a_token() -> None:
    chances = np.array([0.9, 0.8, 0.3, 0.01])
    assert num_worthwhile(8, chances, MEMORY_BOUND) == 4
    assert num_worthwhile(8, chances, COMPUTE_BOUND) == 0
    assert num_worthwhile_passes(8, [0.9, 0.8, 0.7], MEMORY_BOUND) == 3
    assert num_worthwhile_passes(8, [0.9, 0.8, 0.7], COMPUTE_BOUND) == 0
    assert num_worthwhile_passes(8, [0.9, 0.8, 0.001], MEMORY_BOUND) == 2  # a pass costs more than its drafts save


@given(
    st.integers(1, 20),
    st.lists(st.floats(0.0, 1.0), max_size=40),
    st.lists(st.floats(0.01, 2.0), min_size=64, max_size=64),
    st.floats(0.0, 10.0),
)
def test_no_other_number_of_drafts_gives_more_tokens_a_second(
    num_sequences: int, chances: list[float], steps: list[float], least_s: float
) -> None:
    chances.sort(reverse=True)
    rows_s = np.cumsum([0.5, *steps])
    costs = StepCosts(rows_s, 2 * rows_s, rows_s[::-1].cumsum(), rows_s)

    def rate(count: int) -> float:
        seconds = costs.plain[num_sequences]
        if count:
            seconds = max(seconds + costs.drafted[count], costs.verified[num_sequences + count])
        return (num_sequences + sum(chances[:count])) / max(seconds, least_s)

    chosen = num_worthwhile(num_sequences, np.array(chances), costs, least_s)
    best = max(map(rate, range(len(chances) + 1)))
    assert rate(chosen) == pytest.approx(best) or (chosen == 0 and best <= 1.0501 * rate(0))


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = interpolated({1: 2.0, 2: 3.0, 8: 6.0}, 16)
    assert costs[[1, 2, 5, 8, 16]].tolist() == [2.0, 3.0, 4.5, 6.0, 12.0]
    assert interpolated({1: 2.0, 2: 30.0, 4: 6.0}, 4).tolist() == [2.0, 2.0, 6.0, 6.0, 6.0]


def test_chances_follow_what_was_right_of_late() -> None:
    acceptance = Acceptance(2, 3)
    assert acceptance.chances(0) == acceptance.chances(1)
    for _ in range(200):
        acceptance.note(1, 3, 1)  # the third is never tried
    first, second, _ = acceptance.chances(1)
    assert first > 0.98 and second < 0.03
    before = acceptance.chances(0)
    for _ in range(4000):
        acceptance.end_step()
    assert acceptance.chances(1) == pytest.approx(before, abs=0.03)


@pytest.mark.parametrize("method", ["mtp", "suffix"])
def test_the_smallest_engines_are_measured_too(tmp_path: Path, method: str) -> None:
    path = write_checkpoint(tmp_path, 0, **TINY | {"num_nextn_predict_layers": 1})
    drafts = {"method": method, "num_speculative_tokens": 7}
    for longest in (2, 5, 17):
        sizes = {"max_num_seqs": 5, "max_num_batched_tokens": 6, "block_size": 4}
        blocks = -(-longest // 4) * 2
        llm = LLM(
            path,
            skip_tokenizer_init=True,
            max_model_len=longest,
            num_gpu_blocks_override=blocks,
            speculative_config=drafts,
            **sizes,
        )
        params = SamplingParams(max_tokens=longest, seed=1, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": [2]}] * 6, params, use_tqdm=False)
        assert [len(one.outputs[0].token_ids) for one in outputs] == [longest - 1] * 6


def run_measured(path: str, way: dict[str, Any]) -> Any:
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    llm = LLM(path, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4, speculative_config=drafts, **way)
    params = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": [2, 3, 4]}] * 4, params, use_tqdm=False)
    costs = llm.core.scheduler.speculation.costs
    return [one.outputs[0].token_ids for one in outputs], [column.tolist() for column in vars(costs).values()]


@pytest.mark.parametrize("way", [{}, {"enforce_eager": None}], ids=str)
def test_ranks_that_step_together_measure_one_cost(tmp_path: Path, way: dict[str, Any]) -> None:
    path = write_checkpoint(tmp_path, 0, **TINY | {"num_nextn_predict_layers": 1})
    expected = LLM(path, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4)
    params = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)
    outputs = expected.generate([{"prompt_token_ids": [2, 3, 4]}] * 4, params, use_tqdm=False)
    ranks = run_ranks(run_measured, 2, path, {"data_parallel_size": 2, "enable_expert_parallel": True, **way})
    assert ranks[0] == ranks[1]
    tokens, costs = ranks[0]
    assert tokens == [one.outputs[0].token_ids for one in outputs]
    for column in costs[:2]:
        assert len(column) == 4 * 4 + 1 and all(cost > 0 for cost in column[1:])
