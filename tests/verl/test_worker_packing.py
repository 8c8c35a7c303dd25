"""Packing rows into micro-batches and back loses nothing and mixes nothing up."""

from itertools import pairwise

import pytest
import torch

from verl.utils.megatron.packed_batch import pack_micro_batch, padded_lengths, row_tokens, scatter_to_rows
from verl.utils.partitions import balanced_order, units_of_rows


def padded_batch(prompt_lengths: list[int], response_lengths: list[int], width: int = 5) -> dict[str, torch.Tensor]:
    num_rows = len(prompt_lengths)
    prompt_mask = torch.stack([torch.arange(width) >= width - n for n in prompt_lengths])
    response_mask = torch.stack([torch.arange(width) < n for n in response_lengths])
    attention_mask = torch.cat([prompt_mask, response_mask], -1).long()
    ids = torch.arange(1, num_rows * 2 * width + 1).view(num_rows, 2 * width) * attention_mask
    return {"input_ids": ids, "attention_mask": attention_mask, "response_mask": response_mask.long()}


def test_packed_tokens_labels_and_scored_positions() -> None:
    batch = padded_batch([3, 5, 1], [2, 0, 4])
    micro = pack_micro_batch(batch["input_ids"], batch["attention_mask"], batch["response_mask"], [2, 0, 1], 4)
    lengths = [5, 5, 5]
    assert micro.num_tokens == 16
    assert micro.packed_seq_params.cu_seqlens.tolist() == [0, 5, 10, 15, 16]
    assert micro.position_ids_T.tolist() == [*range(lengths[0]), *range(lengths[1]), *range(lengths[2]), 0]
    # The token that a scored position predicts is the response token at its row and column.
    predicted = micro.labels_S
    width = batch["response_mask"].size(1)
    assert torch.equal(predicted, batch["input_ids"][micro.rows_S, width + micro.cols_S])
    assert micro.rows_S.numel() == int(batch["response_mask"].sum())


def test_scatter_to_rows_inverts_packing_over_several_micro_batches() -> None:
    batch = padded_batch([3, 5, 1, 2], [2, 5, 4, 1])
    micros = [
        pack_micro_batch(batch["input_ids"], batch["attention_mask"], batch["response_mask"], rows, 1)
        for rows in ([1, 3], [0], [2])
    ]
    values = [micro.labels_S.float() for micro in micros]
    expected = batch["input_ids"][:, 5:].float() * batch["response_mask"]
    assert torch.equal(scatter_to_rows(values, micros, batch["response_mask"].shape), expected)


def test_empty_micro_batch_is_one_dummy_sequence() -> None:
    batch = padded_batch([3], [2])
    micro = pack_micro_batch(batch["input_ids"], batch["attention_mask"], batch["response_mask"], [], 2)
    assert micro.num_tokens == 2
    assert micro.rows_S.numel() == 0
    assert micro.packed_seq_params.cu_seqlens.tolist() == [0, 2]


@pytest.mark.parametrize(("cp_size", "tp_size"), [(2, 1), (4, 1), (2, 4), (3, 2)])
def test_parts_of_context_parallel_ranks_make_up_the_micro_batch(cp_size: int, tp_size: int) -> None:
    batch = padded_batch([3, 5, 1], [2, 0, 4])
    parts = [
        pack_micro_batch(
            batch["input_ids"], batch["attention_mask"], batch["response_mask"], [2, 0, 1], tp_size, cp_size, cp_rank
        )
        for cp_rank in range(cp_size)
    ]
    width = batch["response_mask"].size(1)
    cu_seqlens = parts[0].packed_seq_params.cu_seqlens
    assert all(int(length) % (2 * cp_size) == 0 for length in cu_seqlens.diff())
    assert padded_lengths(torch.tensor([5]), cp_size).item() == cu_seqlens[1]
    for part in parts:
        assert part.num_tokens * cp_size == cu_seqlens[-1]
        assert part.num_tokens % tp_size == 0
        assert torch.equal(part.packed_seq_params.cu_seqlens, cu_seqlens)
        assert torch.equal(part.labels_S, batch["input_ids"][part.rows_S, width + part.cols_S])
        is_real_T = ~part.packed_seq_params.is_padding_T
        assert is_real_T.nonzero().flatten().tolist() == sorted(part.token_positions_N.tolist())
        own_ids = batch["input_ids"][part.token_rows_N, part.token_cols_N]
        assert torch.equal(part.input_ids_T[part.token_positions_N], own_ids)
        first_col = batch["attention_mask"].argmax(-1)[part.token_rows_N]
        assert torch.equal(part.position_ids_T[part.token_positions_N], part.token_cols_N - first_col)
        assert part.loss_mask_W.sum() == part.positions_S.numel()
    scored = sorted((int(row), int(col)) for part in parts for row, col in zip(part.rows_S, part.cols_S, strict=True))
    assert scored == sorted((int(row), int(col)) for row, col in batch["response_mask"].nonzero())
    assert sum(part.token_rows_N.numel() for part in parts) == int(batch["attention_mask"].sum())


@pytest.mark.parametrize("cp_size", [2, 4])
def test_empty_micro_batch_has_a_part_for_every_rank(cp_size: int) -> None:
    batch = padded_batch([3], [2])
    for cp_rank in range(cp_size):
        micro = pack_micro_batch(
            batch["input_ids"], batch["attention_mask"], batch["response_mask"], [], 4, cp_size, cp_rank
        )
        assert micro.num_tokens == 4 and bool(micro.packed_seq_params.is_padding_T.all())
        assert micro.packed_seq_params.cu_seqlens.tolist() == [0, 4 * cp_size]


def test_a_prompt_that_rows_share_is_packed_once_and_taken_by_each() -> None:
    batch = padded_batch([3, 3, 5, 3], [2, 4, 1, 0])
    batch["input_ids"][[1, 3], :5] = batch["input_ids"][0, :5]
    given = (batch["input_ids"], batch["attention_mask"], batch["response_mask"], [2, 0, 3, 1])
    whole, shared = pack_micro_batch(*given, 4), pack_micro_batch(*given, 4, shares_prompts=True)
    assert (whole.num_tokens, shared.num_tokens) == (24, 16)
    prompts = shared.packed_seq_params.shared_prompts
    assert prompts is not None
    bounds = shared.packed_seq_params.cu_seqlens.tolist()
    assert bounds[:-1] == whole.packed_seq_params.cu_seqlens.tolist()[:-1]
    num_real = bounds[-2]
    for name in ("input_ids_T", "position_ids_T"):
        expanded = getattr(shared, name)[prompts.computed_F]
        assert torch.equal(expanded[:num_real], getattr(whole, name)[:num_real])
        assert torch.equal(expanded[prompts.whole_T], getattr(shared, name))
    assert torch.equal(shared.labels_S, whole.labels_S)
    assert torch.equal(shared.input_ids_T[shared.positions_S], whole.input_ids_T[whole.positions_S])
    assert prompts.copies_T.sum() == bounds[-1]
    found = sorted([*range(*span[:2]), *range(*span[2:])] for span in prompts.spans_B4.tolist())
    assert found == sorted(prompts.computed_F[start:end].tolist() for start, end in pairwise(bounds))
    assert [span[0] for span in prompts.spans_B4.tolist()] == [0, 6, 6, 6, 15]  # one prompt's beside each other


@pytest.mark.parametrize(
    ("num_ranks", "shares_prompts", "expected"), [(1, False, 9024), (1, True, 2304), (2, True, 1152)]
)
def test_tokens_of_eight_prompts_with_eight_samples(num_ranks: int, shares_prompts: bool, expected: int) -> None:
    """Of 120 + 21 tokens each, on every rank, with a budget that takes them at once when prompts are shared."""
    prompts = torch.arange(8 * 120).view(8, 120).repeat_interleave(8, dim=0)
    responses = torch.ones(64, 21, dtype=torch.long)
    batch = torch.cat([prompts, responses], -1), torch.ones(64, 141, dtype=torch.long), responses
    group_size = 8 if shares_prompts else 1
    order = balanced_order([141] * 64, num_ranks, 64, group_size=group_size, prompt_lengths=[120] * 64)
    for rows in torch.tensor(order).chunk(num_ranks):
        mine = tuple(column[rows] for column in batch)
        tokens = row_tokens(*mine, 1, shares_prompts=shares_prompts)
        units, parts = units_of_rows(tokens, 1, 2304)
        assert len(parts) == (1 if shares_prompts else 4)
        chunks = [[row for unit in part for row in units[unit]] for part in parts]
        micro_batches = [pack_micro_batch(*mine, chunk, 1, shares_prompts=shares_prompts) for chunk in chunks]
        assert sum(micro.num_tokens for micro in micro_batches) == expected


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("shares_prompts", [False, True])
def test_a_row_that_begins_anew_is_one_sequence_after_another(cp_size: int, shares_prompts: bool) -> None:
    batch = padded_batch([3, 3, 2], [5, 5, 4])
    batch["input_ids"][1, :5] = batch["input_ids"][0, :5]
    starts = torch.zeros_like(batch["response_mask"])
    starts[0, 2], starts[0, 4], starts[2, 1] = 1 + 4, 1 + 1, 1  # keep 4, 1 and no tokens
    scored = batch["response_mask"].clone()
    scored[0, 2] = scored[2, 1] = 0  # given
    given = batch["input_ids"], batch["attention_mask"], scored
    first, other = batch["input_ids"][0, 2:].tolist(), batch["input_ids"][2, 3:9].tolist()
    sequences = [first[:5], [*first[:4], first[5], first[6]], [first[0], first[7]]]
    sequences += [batch["input_ids"][1, 2:].tolist(), other[:3], other[3:]]
    shares = shares_prompts and cp_size == 1
    parts = [
        pack_micro_batch(*given, [0, 1, 2], 1, cp_size, rank, shares_prompts=shares, row_starts_BR=starts)
        for rank in range(cp_size)
    ]
    lengths = parts[0].packed_seq_params.cu_seqlens.diff().tolist()[: len(sequences)]
    assert lengths == [padded_lengths(torch.tensor([len(one)]), cp_size).item() for one in sequences]
    tokens = row_tokens(*given, cp_size, shares_prompts=shares, row_starts_BR=starts)
    assert tokens.of([0, 1, 2]) == sum(part.num_tokens for part in parts)
    places = sorted((int(row), int(col)) for part in parts for row, col in zip(part.rows_S, part.cols_S, strict=True))
    assert places == sorted((int(row), int(col)) for row, col in scored.nonzero())
    for part in parts:
        assert torch.equal(part.labels_S, batch["input_ids"][:, 5:][part.rows_S, part.cols_S])
        assert part.members_M.tolist() == [0, 1, 2]
        own_ids = batch["input_ids"][part.token_rows_N, part.token_cols_N]
        assert torch.equal(part.input_ids_T[part.token_positions_N], own_ids)
    own = sum(int((~part.token_is_kept_N).sum()) for part in parts)
    assert own == int(batch["attention_mask"].sum())
    if cp_size == 1 and not shares:
        assert parts[0].input_ids_T.tolist() == [token for one in sequences for token in one]
