"""Rows over ranks, mini-batches and micro-batches: nothing is lost, loads are close, budgets hold, in time for many."""

from __future__ import annotations

import random
import time

import pytest
import torch

from tests.megatron.model_helpers import one_process_groups
from verl.utils.partitions import RowTokens, balanced_order, get_seqlen_balanced_partitions, partitions_within, split_to
from verl.workers.actor import megatron_actor
from verl.workers.actor.megatron_actor import split_rows


def lengths_like_math_answers(count: int, seed: int = 0) -> list[int]:
    """Prompt and response tokens of answers that reason: most are short, some reach the limit of 4096."""
    rng = random.Random(seed)
    return [min(int(rng.lognormvariate(7, 0.8)), 4096) for _ in range(count)]


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_every_rank_gets_its_share_of_the_same_mini_batches(num_ranks: int) -> None:
    lengths = lengths_like_math_answers(64)
    order = balanced_order(lengths, num_ranks, rows_per_mini_batch=32)
    assert sorted(order) == list(range(64))
    per_rank = [order[rank * 64 // num_ranks : (rank + 1) * 64 // num_ranks] for rank in range(num_ranks)]
    for mini_batch in range(2):
        shares = [rows[mini_batch * 32 // num_ranks : (mini_batch + 1) * 32 // num_ranks] for rows in per_rank]
        assert sorted(row for share in shares for row in share) == list(range(mini_batch * 32, mini_batch * 32 + 32))
        loads = [sum(lengths[row] for row in share) for share in shares]
        assert max(loads) <= 1.2 * sum(loads) / num_ranks
    shuffled = balanced_order(lengths, num_ranks, rows_per_mini_batch=32, shuffle_seed=1)
    firsts = [shuffled[rank * 64 // num_ranks :][: 32 // num_ranks] for rank in range(num_ranks)]
    assert sorted(row for first in firsts for row in first) == sorted(
        balanced_order(lengths, 1, 32, shuffle_seed=1)[:32]
    )
    unbalanced = balanced_order(lengths, num_ranks, rows_per_mini_batch=32, balance=False)
    assert unbalanced[: 32 // num_ranks] == list(range(32 // num_ranks))


def test_samples_of_a_prompt_stay_together_on_a_rank_and_prompts_count_once() -> None:
    lengths, prompts = [length + 900 for length in lengths_like_math_answers(64)], [900] * 64
    order = balanced_order(lengths, 2, rows_per_mini_batch=32, group_size=4, prompt_lengths=prompts)
    assert sorted(order) == list(range(64))
    assert all(order[i : i + 4] == list(range(order[i], order[i] + 4)) for i in range(0, 64, 4))
    for mini_batch in range(2):
        rows = [order[rank * 32 + mini_batch * 16 :][:16] for rank in range(2)]
        assert sorted(rows[0] + rows[1]) == list(range(mini_batch * 32, mini_batch * 32 + 32))
        loads = [sum(lengths[row] for row in share) - 12 * 900 for share in rows]
        assert max(loads) <= 1.2 * sum(loads) / 2
    # Eight groups do not divide over 16 ranks, halves of them do; a shuffle mixes rows.
    halves = balanced_order([910] * 64, 16, 32, group_size=4, prompt_lengths=prompts)
    assert all(halves[i] % 2 == 0 and halves[i + 1] == halves[i] + 1 for i in range(0, 64, 2))
    shuffled = balanced_order(lengths, 2, 32, group_size=4, prompt_lengths=prompts, shuffle_seed=1)
    assert shuffled == balanced_order(lengths, 2, 32, shuffle_seed=1)


def test_samples_of_a_prompt_are_parted_where_a_rank_would_have_more_to_compute() -> None:
    own = [100] * 8 + [10] * 8
    for prompt, together in ((20, 4), (800, 8)):
        order = balanced_order([prompt + n for n in own], 2, 16, group_size=8, prompt_lengths=[prompt] * 16)
        assert sorted(order) == list(range(16))
        assert [len({row // 8 for row in order[rank * 8 :][:8]}) for rank in range(2)] == [8 // together] * 2


@pytest.mark.parametrize("max_sum", [4096, 6000, 10**6])
def test_micro_batches_keep_to_the_budget_and_are_balanced(max_sum: int) -> None:
    lengths = lengths_like_math_answers(200)
    parts = partitions_within(lengths, max_sum)
    assert sorted(row for part in parts for row in part) == list(range(200))
    sums = [sum(lengths[row] for row in part) for part in parts]
    assert max(sums) <= max_sum
    assert len(parts) <= 1 + 1.25 * sum(lengths) / max_sum  # best-fit decreasing is within 11/9 of the least
    assert partitions_within(lengths, max_sum) == parts
    finer = split_to(parts, lengths, len(parts) + 5)
    assert len(finer) == len(parts) + 5
    assert sorted(row for part in finer for row in part) == list(range(200))
    assert max(sum(lengths[row] for row in part) for part in finer) <= max_sum


def test_a_row_above_the_budget_stands_alone_and_no_rows_need_no_partitions() -> None:
    parts = partitions_within([5, 100, 4, 1], 10)
    assert [1] in parts and sorted(map(len, parts)) == [1, 3]
    assert partitions_within([], 10) == []
    assert split_to([[0], [1]], [3, 3], 5) == [[0], [1]]


def test_micro_batches_of_a_rank_begin_with_the_heaviest() -> None:
    lengths = torch.tensor(lengths_like_math_answers(30))
    tokens = RowTokens(lengths.tolist(), [0] * 30, range(30))
    with one_process_groups() as groups:
        by_rows = split_rows(tokens, micro_batch_size=5, max_token_len=None, dp_group=groups.dp)
        by_tokens = split_rows(tokens, micro_batch_size=5, max_token_len=5000, dp_group=groups.dp)
        rest = split_rows(tokens, micro_batch_size=7, max_token_len=None, dp_group=groups.dp)
    for chunks in (by_rows, by_tokens, rest):
        assert sorted(row for chunk in chunks for row in chunk) == list(range(30))
        sums = [int(lengths[chunk].sum()) for chunk in chunks]
        assert sums == sorted(sums, reverse=True)
    assert {len(chunk) for chunk in by_rows} == {5}
    sums = [int(lengths[chunk].sum()) for chunk in by_rows]
    assert max(sums) <= 1.15 * min(sums)


def test_micro_batches_hold_whole_prompts_as_far_as_they_fit() -> None:
    """Four prompts of 100 tokens with samples of 10 each, in an order that does not know of prompts."""
    tokens = RowTokens([10] * 32, [100] * 32, [row % 4 for row in range(32)])

    def prompts_of(rows: int = 1, limit: int | None = None) -> list[tuple[int, int]]:
        with one_process_groups() as groups:
            chunks = split_rows(tokens, micro_batch_size=rows, max_token_len=limit, dp_group=groups.dp)
        assert sorted(row for chunk in chunks for row in chunk) == list(range(32))
        assert limit is None or all(tokens.of(chunk) <= limit for chunk in chunks)
        return [(len({row % 4 for row in chunk}), len(chunk)) for chunk in chunks]

    assert prompts_of(8) == [(1, 8)] * 4 and prompts_of(16) == [(2, 16)] * 2 and prompts_of(2) == [(1, 2)] * 16
    assert prompts_of(12) == [(2, 12), (2, 12), (1, 8)]
    assert prompts_of(limit=360) == [(2, 16)] * 2 and prompts_of(limit=359) == [(1, 8)] * 4
    assert prompts_of(limit=150) == [(1, 4)] * 8


def test_a_rank_that_needs_more_micro_batches_splits_prompts_last(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = RowTokens([10] * 32, [100] * 32, [row % 4 for row in range(32)])

    def sizes_of(wanted: int) -> list[int]:
        monkeypatch.setattr(megatron_actor, "reduce_over", lambda *_: torch.tensor([wanted]))
        with one_process_groups() as groups:
            chunks = split_rows(tokens, micro_batch_size=1, max_token_len=360, dp_group=groups.dp)
        assert sorted(row for chunk in chunks for row in chunk) == list(range(32))
        return [len(chunk) for chunk in chunks]

    assert sizes_of(2) == [16] * 2 and sizes_of(3) == [16, 8, 8] and sizes_of(4) == [8] * 4
    assert sizes_of(5) == [8] * 3 + [4] * 2 and sizes_of(33) == [1] * 32 + [0]


def test_sixteen_thousand_ranks_are_balanced_in_time() -> None:
    num_ranks, rows_each = 16_384, 8
    lengths = lengths_like_math_answers(num_ranks * rows_each)
    start = time.process_time()
    order = balanced_order(lengths, num_ranks, rows_per_mini_batch=len(lengths))
    most = 0
    for rank in range(num_ranks):
        mine = [lengths[row] for row in order[rank * rows_each : (rank + 1) * rows_each]]
        most = max(most, len(partitions_within(mine, 8192)))
    seconds = time.process_time() - start
    loads = [sum(lengths[row] for row in order[i : i + rows_each]) for i in range(0, len(order), rows_each)]
    assert max(loads) <= 1.02 * sum(loads) / num_ranks
    assert most <= 3
    assert seconds < 15, f"{seconds:.1f} s of the 30 s that maps, groups and batches may take together"


def test_partitions_of_unequal_size_are_as_even_as_rows_allow() -> None:
    lengths = lengths_like_math_answers(300)
    sums = [sum(lengths[row] for row in part) for part in get_seqlen_balanced_partitions(lengths, 40, equal_size=False)]
    assert max(sums) - min(sums) <= 0.05 * max(sums)
