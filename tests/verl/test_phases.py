"""Training runs eagerly, generation may compile; memory is taken apart where the phases meet."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl.workers.phases import release_cached_memory, training_phase


@pytest.fixture
def compiled() -> tuple[Callable[[torch.Tensor], torch.Tensor], list[int]]:
    """A compiled function, and a list that grows with every compilation."""
    compilations: list[int] = []

    def backend(module: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        compilations.append(1)
        return module.forward

    torch._dynamo.reset()
    return torch.compile(lambda x: x.sin() + 1, backend=backend), compilations


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


def allocator() -> tuple[Any, list[str]]:
    """What stands for ``torch.npu``, and the calls it has had."""
    calls: list[str] = []
    names = ("empty_cache", "empty_virt_addr_cache")
    return SimpleNamespace(**{name: lambda name=name: calls.append(name) for name in names}), calls


def test_memory_is_unmapped_where_segments_expand_and_freed_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, calls = allocator()
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "max_split_size_mb:256,expandable_segments:True")
    release_cached_memory(accelerator)
    assert calls == ["empty_virt_addr_cache"]
    monkeypatch.delenv("PYTORCH_NPU_ALLOC_CONF")
    release_cached_memory(accelerator)
    assert calls[1:] == ["empty_cache"]
    release_cached_memory(None)
