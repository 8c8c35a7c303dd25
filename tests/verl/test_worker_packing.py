"""Packing rows into micro-batches and back loses nothing and mixes nothing up."""

import torch

from verl.utils.megatron.packed_batch import pack_micro_batch, scatter_to_rows


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
    predicted = micro.labels_T[micro.positions_S]
    width = batch["response_mask"].size(1)
    assert torch.equal(predicted, batch["input_ids"][micro.rows_S, width + micro.cols_S])
    assert micro.rows_S.numel() == int(batch["response_mask"].sum())


def test_scatter_to_rows_inverts_packing_over_several_micro_batches() -> None:
    batch = padded_batch([3, 5, 1, 2], [2, 5, 4, 1])
    micros = [
        pack_micro_batch(batch["input_ids"], batch["attention_mask"], batch["response_mask"], rows, 1)
        for rows in ([1, 3], [0], [2])
    ]
    values = [micro.labels_T[micro.positions_S].float() for micro in micros]
    expected = batch["input_ids"][:, 5:].float() * batch["response_mask"]
    assert torch.equal(scatter_to_rows(values, micros, batch["response_mask"].shape), expected)


def test_empty_micro_batch_is_one_dummy_sequence() -> None:
    batch = padded_batch([3], [2])
    micro = pack_micro_batch(batch["input_ids"], batch["attention_mask"], batch["response_mask"], [], 2)
    assert micro.num_tokens == 2
    assert micro.rows_S.numel() == 0
    assert micro.packed_seq_params.cu_seqlens.tolist() == [0, 2]
