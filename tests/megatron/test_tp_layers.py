"""Tensor-parallel layers, mappings and losses on two ranks against their one-process meaning."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.ops import reference_fp8, reference_ops
from megatron.core.parallel_state import ProcessGroups, initialize_model_parallel
from megatron.core.tensor_parallel import cross_entropy, layers, mappings
from megatron.core.tensor_parallel.weight_init import WeightInit
from megatron.core.transformer.transformer_config import ModelParallelConfig
from tests.megatron.model_helpers import one_process_groups
from tests.parallel.launcher import run_ranks


def _close(got: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert got is not None and expected is not None  # torch.testing would import sympy on every rank
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6), (got - expected).abs().max()


def _full(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _ranks() -> None:
    groups = initialize_model_parallel(2)
    _linears(groups, groups.rank, 2)
    _fp8_linears(groups, groups.rank, 2)
    _embedding(groups, groups.rank, 2)
    for check in (_losses, _mappings, _uneven_all_to_all):
        check(groups.tp, groups.rank, 2)


def _linears(groups: ProcessGroups, rank: int, size: int) -> None:
    x, out_grad = _full(6, 4, seed=0).float(), _full(6, 4, seed=1).float()
    init = WeightInit(seed=3, std=1.0)
    whole = [init.normal("up", 8, 4).requires_grad_(), init.normal("down", 4, 8).requires_grad_()]
    x_whole = x.clone().requires_grad_()
    expected = F.linear(F.linear(x_whole, whole[0]), whole[1])
    expected.backward(out_grad)
    for is_sequence_parallel in (True, False):
        config = ModelParallelConfig(sequence_parallel=is_sequence_parallel)
        up = layers.ColumnParallelLinear(config, groups, reference_ops(), 4, 8)
        down = layers.RowParallelLinear(config, groups, reference_ops(), 8, 4)
        up.init_weights(init, "up")
        down.init_weights(init, "down")

        def mine(whole: torch.Tensor, split: bool = is_sequence_parallel) -> torch.Tensor:
            return whole.chunk(size)[rank] if split else whole

        x_local = mine(x).clone().requires_grad_()
        y = down(up(x_local))
        y.backward(mine(out_grad))
        _close(y, mine(expected))
        _close(x_local.grad, mine(x_whole.grad))
        _close(up.weight.grad, whole[0].grad.chunk(size)[rank])
        _close(down.weight.grad, whole[1].grad.chunk(size, dim=1)[rank])
        assert up.weight.tensor_model_parallel and up.weight.partition_dim == 0 and down.weight.partition_dim == 1


def _fp8_linears(groups: ProcessGroups, rank: int, size: int) -> None:
    """Shards in whole blocks of 128 have the blocks of one process; the ranks' terms are then added in another order.

    Tokens are gathered before they are quantised for the weight gradient, so there their blocks are the same too.
    """
    products = reference_fp8.Fp8Products()
    ops = replace(reference_ops(), linear_products=products)
    x, init = _full(6, 256, seed=0).float(), WeightInit(seed=3, std=1.0)
    whole = init.normal("fp8", 256, 256)
    grad = _full(6, 256, seed=1).float()
    wanted = products.forward(x, whole), products.dgrad(grad, whole), products.wgrad(grad, x, whole)
    config = ModelParallelConfig(sequence_parallel=True)
    rows = slice(3 * rank, 3 * rank + 3)  # this rank's tokens
    columns, every = slice(128 * rank, 128 * rank + 128), slice(None)
    for layer, x_local, grad_local, y_part, x_part, w_part in (
        (layers.ColumnParallelLinear, x[rows], grad[:, columns], (every, columns), (rows, every), columns),
        (
            layers.RowParallelLinear,
            x[:, columns],
            grad[rows],
            (rows, slice(256)),
            (slice(6), columns),
            (slice(256), columns),
        ),
    ):
        linear = layer(config, groups, ops, 256, 256)
        linear.init_weights(init, "fp8")
        x_local = x_local.clone().requires_grad_()
        y = linear(x_local)
        y.backward(grad_local)
        for got, want in zip(
            (y, x_local.grad, linear.weight.grad),
            (wanted[0][y_part], wanted[1][x_part], wanted[2][w_part]),
            strict=True,
        ):
            assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def _embedding(groups: ProcessGroups, rank: int, size: int) -> None:
    ids = torch.tensor([0, 7, 3, 3, 5, 1])
    whole = WeightInit(3, 1.0).normal("words", 8, 4).requires_grad_()
    out_grad = _full(6, 4, seed=1).float()
    F.embedding(ids, whole).backward(out_grad)
    words = layers.VocabParallelEmbedding(ModelParallelConfig(sequence_parallel=True), groups, 8, 4)
    words.init_weights(WeightInit(3, 1.0), "words")
    y = words(ids)
    y.backward(out_grad.chunk(size)[rank])
    _close(y, whole[ids].chunk(size)[rank])
    _close(words.weight.grad, whole.grad.chunk(size)[rank])


def _losses(group: dist.ProcessGroup, rank: int, size: int) -> None:
    whole = (_full(5, 12, seed=0) * 3).requires_grad_()
    target = torch.tensor([0, 11, 4, 7, 7])
    weight = _full(5, seed=1)
    log_probs = whole.log_softmax(-1)
    expected = {
        "loss": -log_probs.gather(1, target.unsqueeze(1)).squeeze(1),
        "entropy": -(log_probs.exp() * log_probs).sum(-1),
    }
    local = whole.detach().chunk(size, dim=1)[rank].clone().requires_grad_()
    got = {
        "loss": cross_entropy.vocab_parallel_cross_entropy(local, target, group, reference_ops()),
        "entropy": cross_entropy.vocab_parallel_entropy(local, group, reference_ops()),
    }
    loss, entropy = cross_entropy.vocab_parallel_cross_entropy_and_entropy(local, target, group, reference_ops())
    _close(entropy, expected["entropy"])
    assert not entropy.requires_grad and torch.equal(loss, got["loss"])
    for name in expected:
        _close(got[name], expected[name])
        (expected_grad,) = torch.autograd.grad((expected[name] * weight).sum(), whole, retain_graph=True)
        (grad,) = torch.autograd.grad((got[name] * weight).sum(), local)
        _close(grad, expected_grad.chunk(size, dim=1)[rank])


def _mappings(group: dist.ProcessGroup, rank: int, size: int) -> None:
    """<A x, y> summed over the ranks equals <x, A^T y>: every backward is the transpose of its forward."""
    for mapping in (mappings.gather_from_sequence_parallel_region, mappings.reduce_scatter_to_sequence_parallel_region):
        x = _full(4, 4, seed=rank).requires_grad_()
        y = mapping(x, group)
        other = _full(*y.shape, seed=10 + rank)
        y.backward(other)
        sides = torch.stack([(y.detach() * other).sum(), (x.detach() * x.grad).sum()])
        dist.all_reduce(sides, group=group)
        _close(sides[0], sides[1])
    whole = _full(4, 4, seed=5)
    _close(mappings.gather_from_sequence_parallel_region(whole.chunk(size)[rank], group), whole)
    _close(mappings.reduce_from_tensor_model_parallel_region(whole, group), whole * size)
    x = whole.clone().requires_grad_()
    mappings.copy_to_tensor_model_parallel_region(x, group).sum().backward()
    _close(x.grad, torch.full_like(x, size))


def _uneven_all_to_all(group: dist.ProcessGroup, rank: int, size: int) -> None:
    send = [[1, 3], [0, 2]][rank]
    receive = [[1, 0], [3, 2]][rank]
    x = (torch.arange(float(sum(send))) + 10 * rank).unsqueeze(1).requires_grad_()
    y = mappings.all_to_all(group, x, receive, send)
    assert y.flatten().tolist() == [[0.0], [1.0, 2.0, 3.0, 10.0, 11.0]][rank]
    (y * y.detach()).sum().backward()
    assert x.grad is not None and x.grad.flatten().tolist() == x.flatten().tolist()


def test_two_ranks() -> None:
    run_ranks(_ranks, 2, timeout_s=60)


def test_losses_in_bf16_and_over_several_chunks() -> None:
    """2^20 entries of vocabulary make chunks of 4 tokens."""
    logits = torch.randn(6, 1 << 20).to(torch.bfloat16)
    target = torch.arange(6)
    with one_process_groups() as groups:
        whole = _loss_and_grad(logits, target, groups.tp)
        single = [_loss_and_grad(logits[i : i + 1], target[i : i + 1], groups.tp) for i in range(6)]
    for index in range(4):
        torch.testing.assert_close(torch.cat([part[index] for part in single]), whole[index])
    assert whole[0].dtype == torch.float32 and whole[1].dtype == torch.bfloat16
    # A sum of 2^20 floats is less exact in torch, where a processor adds a few at a time.
    expected = F.cross_entropy(logits.double(), target, reduction="none").float()
    torch.testing.assert_close(whole[0], expected)


def _loss_and_grad(logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    logits = logits.detach().requires_grad_()
    loss = cross_entropy.vocab_parallel_cross_entropy(logits, target, group, reference_ops())
    entropy = cross_entropy.vocab_parallel_entropy(logits, group, reference_ops())
    grads = [torch.autograd.grad(value.sum(), logits)[0] for value in (loss, entropy)]
    return [loss.detach(), grads[0], entropy.detach(), grads[1]]
