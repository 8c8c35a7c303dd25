"""Attention of the CUDA table equals the reference: torch's flash attention in the form that stands in for it."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron.core.ops import TrainOps
from megatron.core.ops.cuda import attention
from megatron.core.ops.reference_attention import merge, whole_sequence_attention
from tests.megatron.cuda_op_helpers import MARKS, REFERENCE, TOLERANCE, assert_close, assert_same, randn
from tests.megatron.model_helpers import shared_prompts

pytestmark = MARKS


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("kv_heads", "value_size"), [(4, 8), (4, 6), (2, 12), (1, 5)])
def test_attention_of_packed_sequences(
    cuda: TrainOps, flash_calls: list, dtype: torch.dtype, causal: bool, kv_heads: int, value_size: int
) -> None:
    bounds = torch.tensor([0, 5, 6, 11, 20, 20]).int()  # two of one length, one token alone, none at all

    def run(ops: TrainOps, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ops.core_attention(q, k, v, bounds, 9, 0.3, causal)

    assert_same(cuda, run, dtype, (20, 4, 8), (20, kv_heads, 8), (20, kv_heads, value_size))
    in_half = dtype == torch.bfloat16  # float32 goes to the reference, as the table says
    assert flash_calls == [("forward", 9, 9), ("backward", 9, 9)] * in_half


def test_attention_reads_parts_of_wider_tensors(cuda: TrainOps, flash_calls: list) -> None:
    """Keys and values of one projection, at any offset, as the kernel does not take them."""
    bounds = torch.tensor([0, 3, 7]).int()

    def run(ops: TrainOps, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        k, v = kv.split([16, 13], dim=-1)
        return ops.core_attention(q[..., 1:], k, v, bounds, 4, 0.3)

    assert_same(cuda, run, torch.bfloat16, (7, 4, 17), (7, 2, 29))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("kv_heads", "value_size"), [(4, 8), (2, 3)])
def test_attention_blocks_and_their_gradients(
    cuda: TrainOps, flash_calls: list, dtype: torch.dtype, causal: bool, kv_heads: int, value_size: int
) -> None:
    """Queries are the last ones of their sequence; out and lse of the gradient are those of all keys together."""
    bounds = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in ([2, 1, 3], [4, 1, 5])]
    q, k = randn(dtype, 6, 4, 8), randn(dtype, 10, kv_heads, 8, seed=1)
    v, grad = randn(dtype, 10, kv_heads, value_size, seed=2), randn(dtype, 6, 4, value_size, seed=3)
    got, want = (ops.attention_block(q, k, v, bounds, 0.3, causal) for ops in (cuda, REFERENCE))
    assert got[1].is_contiguous()
    assert_close(got[0], want[0], TOLERANCE[dtype])
    assert_close(got[1], want[1], 1e-5)
    lse = want[1] + 0.25  # as if other keys had a share
    got, want = (
        ops.attention_block_grad(grad, (q, k, v, want[0], lse), bounds, 0.3, causal) for ops in (cuda, REFERENCE)
    )
    for grad_got, grad_want in zip(got, want, strict=True):
        assert_close(grad_got, grad_want, TOLERANCE[dtype])
    if dtype == torch.bfloat16:
        assert flash_calls == [("forward", 6, 10), ("backward", 6, 10)]  # of bounds on the device nothing is read


def test_blocks_of_keys_join_to_the_whole(cuda: TrainOps, flash_calls: list) -> None:
    """As context parallelism has it: the last three queries' own keys, and four keys before them."""
    q, k, v = (randn(torch.bfloat16, 3 if size == 9 else 7, 4, size) for size in (9, 8, 6))
    q = q[..., 1:]
    grad, bounds = randn(torch.bfloat16, 3, 4, 6, seed=3), {n: torch.tensor([0, n]).int() for n in (3, 4, 7)}
    out, lse = cuda.attention_block(q, k[4:], v[4:], (bounds[3], bounds[3]), 0.3)
    out = out.float()
    merge(out, lse, *cuda.attention_block(q, k[:4], v[:4], (bounds[3], bounds[4]), 0.3, False))
    want, want_lse = REFERENCE.attention_block(q, k, v, (bounds[3], bounds[7]), 0.3)
    assert_close(out, want.float(), TOLERANCE[torch.bfloat16])
    assert_close(lse, want_lse, 1e-5)
    own = cuda.attention_block_grad(grad, (q, k[4:], v[4:], out, lse), (bounds[3], bounds[3]), 0.3)
    earlier = cuda.attention_block_grad(grad, (q, k[:4], v[:4], out, lse), (bounds[3], bounds[4]), 0.3, False)
    found = own[0].float() + earlier[0].float(), *(torch.cat(pair) for pair in zip(earlier[1:], own[1:], strict=True))
    wanted = REFERENCE.attention_block_grad(grad, (q, k, v, want, want_lse), (bounds[3], bounds[7]), 0.3)
    for grad_found, grad_wanted in zip(found, wanted, strict=True):
        assert_close(grad_found.float(), grad_wanted.float(), 2 * TOLERANCE[torch.bfloat16])


def test_bounds_on_the_host_give_the_longest_sequences() -> None:
    """On a device of another kind, where the host's bounds travel and nothing comes back."""
    q = torch.empty(6, 4, 8, device="meta", dtype=torch.bfloat16)
    k = torch.empty(10, 4, 8, device="meta", dtype=torch.bfloat16)
    bounds = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in ([2, 1, 3], [4, 1, 5])]
    sequences = attention._sequences(q, k, bounds)
    assert (sequences.longest_q, sequences.longest_k) == (3, 5)
    assert sequences.bounds_q.device == sequences.bounds_k.device == q.device
    out, lse = attention.FlashAttention().block(q, k, k, bounds, 0.3)
    assert out.shape == q.shape and lse.shape == (6, 4) and lse.dtype == torch.float32


def test_heads_that_flash_attention_does_not_take_are_refused(cuda: TrainOps) -> None:
    q = torch.zeros(2, 1, 264, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="heads of 264 on CUDA: flash attention takes up to 256"):
        cuda.core_attention(q, q, q, torch.tensor([0, 2]).int(), 2, 0.3)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("prompts", "own"), [([7, 7, 7, 3, 3, 9, 0], [5, 0, 6, 1, 9, 2, 7]), ([4, 4], [0, 0])])
def test_attention_of_samples_that_share_prompts(
    cuda: TrainOps, flash_calls: list, dtype: torch.dtype, prompts: list[int], own: list[int]
) -> None:
    """As of whole sequences. A sample may end with its prompt, and a prompt may have one sample; the last has none."""
    bounds, longest, shared = shared_prompts(prompts, own)
    num_tokens = len(shared.whole_T)

    def run(ops: TrainOps, *qkv: torch.Tensor) -> torch.Tensor:
        attend = ops.shared_prompt_attention or partial(whole_sequence_attention, ops.core_attention)
        return attend(*qkv, bounds, longest, 0.3, shared)

    assert_same(cuda, run, dtype, (num_tokens, 4, 8), (num_tokens, 2, 8), (num_tokens, 2, 6))
    if dtype == torch.bfloat16:  # the prompts and the samples' own tokens, then these to their prompts
        calls = [(9, 9), (11, 9)] if any(own) else [(4, 4)]
        assert flash_calls == [("forward", *size) for size in calls] + [("backward", *size) for size in calls]
