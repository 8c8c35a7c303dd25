"""Random numbers on the simulated device are decided by its generators: seeds, states and offsets behave."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "randn": lambda: torch.randn(8, device="npu"),
    "rand": lambda: torch.rand(8, device="npu"),
    "randint": lambda: torch.randint(0, 1000, (8,), device="npu"),
    "randperm": lambda: torch.randperm(32, device="npu"),
    "normal_": lambda: torch.empty(8, device="npu").normal_(),
    "exponential_": lambda: torch.empty(8, device="npu").exponential_(),
    "bernoulli": lambda: torch.bernoulli(torch.full((64,), 0.5, device="npu")),
    "multinomial": lambda: torch.multinomial(torch.ones(64, device="npu"), 8),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(64, device="npu")),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_the_same_seed_gives_the_same_numbers(draw: Callable[[], torch.Tensor]) -> None:
    torch.npu.manual_seed(7)
    first, second = draw().cpu(), draw().cpu()
    torch.npu.manual_seed(7)
    assert torch.equal(draw().cpu(), first) and torch.equal(draw().cpu(), second)
    assert not torch.equal(first, second)
    torch.npu.manual_seed(8)
    assert not torch.equal(draw().cpu(), first)


def test_every_way_to_seed() -> None:
    for seed in (torch.manual_seed, torch.npu.manual_seed_all):
        seed(3)
        on_first, on_second = torch.rand(4, device="npu:0").cpu(), torch.rand(4, device="npu:1").cpu()
        seed(3)
        assert torch.equal(torch.rand(4, device="npu:1").cpu(), on_second)
        assert torch.equal(torch.rand(4, device="npu:0").cpu(), on_first)


def test_states_are_saved_and_restored() -> None:
    torch.npu.manual_seed(1)
    torch.rand(3, device="npu")
    state = torch.npu.get_rng_state()
    wanted = torch.rand(5, device="npu").cpu()
    torch.rand(3, device="npu")
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.rand(5, device="npu").cpu(), wanted)


def test_generators_are_their_own() -> None:
    torch.npu.manual_seed(1)
    wanted = torch.rand(4, device="npu").cpu()
    torch.npu.manual_seed(1)
    own = torch.Generator(device="npu").manual_seed(5)
    drawn = torch.rand(4, device="npu", generator=own).cpu()
    assert torch.equal(torch.rand(4, device="npu").cpu(), wanted)
    assert torch.equal(torch.rand(4, device="npu", generator=torch.Generator(device="npu").manual_seed(5)).cpu(), drawn)
    with pytest.raises(RuntimeError, match="Expected a 'npu'"):
        torch.empty(4, device="npu").normal_(generator=torch.Generator())


def test_the_host_generator_does_not_move() -> None:
    torch.manual_seed(2)
    wanted = torch.rand(4)
    torch.manual_seed(2)
    torch.rand(100, device="npu")
    assert torch.equal(torch.rand(4), wanted)


def test_recomputation_draws_the_same() -> None:
    x = torch.ones(256, device="npu", requires_grad=True)
    torch.npu.manual_seed(0)
    out = torch.utils.checkpoint.checkpoint(lambda t: torch.nn.functional.dropout(t, 0.5), x, use_reentrant=False)
    out.sum().backward()
    assert torch.equal(x.grad.cpu(), out.detach().cpu())
