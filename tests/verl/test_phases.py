"""Training runs eagerly, and generation may compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from verl.workers.phases import training_phase


@pytest.fixture
def compiled() -> tuple[Callable[[torch.Tensor], torch.Tensor], list[int]]:
    """A compiled function, and a list that grows with every compilation."""
    compilations: list[int] = []

    def backend(module: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        compilations.append(1)
        return module.forward

    torch._dynamo.reset()
    return torch.compile(lambda x: x.sin() + 1, backend=backend), compilations


@pytest.mark.needs_torch("2.6", "torch.compiler.set_stance; nothing in the tree is compiled without it")
def test_compiled_functions_run_eagerly_in_training_only(
    compiled: tuple[Callable[[torch.Tensor], torch.Tensor], list[int]],
) -> None:
    function, compilations = compiled
    x = torch.ones(3)
    with training_phase():
        assert torch.equal(function(x), x.sin() + 1)
    assert compilations == []
    with pytest.raises(ZeroDivisionError), training_phase():
        raise ZeroDivisionError
    assert torch.equal(function(x), x.sin() + 1)  # as in generation: compiled, also after an error in training
    assert compilations == [1]
    with training_phase():
        function(torch.ones(2, 2))  # would be compiled anew
    assert compilations == [1]
