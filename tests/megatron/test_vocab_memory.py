"""Log-probabilities and entropy hold a bounded number of float32 bytes, whatever the size of the logits is."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.ops import reference_ops
from megatron.core.ops.reference_vocab import MAX_TEMPORARY_BYTES
from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_entropy

NUM_TOKENS, VOCAB = 320, 129_280 // 2  # 79 MiB in float32: five chunks


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made inside held at once; the op's own scratch memory is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs))
        self._known.update(x.untyped_storage() for x in given if isinstance(x, torch.Tensor))
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self._known:
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._known.add(storage)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, num_bytes: int) -> None:
        self.now -= num_bytes


@pytest.mark.parametrize("what", ["log-probabilities", "entropy"])
def test_temporaries_stay_below_the_bound(one_rank: ProcessGroups, what: str) -> None:
    torch.manual_seed(0)
    logits_TV = torch.randn(NUM_TOKENS, VOCAB).bfloat16().requires_grad_()
    target_T = torch.randint(VOCAB, (NUM_TOKENS,))
    saved: set[tuple[int, int]] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.add((tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()))
        return tensor

    with PeakBytes() as forward, saved_tensors_hooks(pack, lambda tensor: tensor):
        if what == "entropy":
            value_T = vocab_parallel_entropy(logits_TV, one_rank.tp, reference_ops())
        else:
            value_T = vocab_parallel_cross_entropy(logits_TV, target_T, one_rank.tp, reference_ops())
    own = logits_TV.untyped_storage()
    assert (own.data_ptr(), own.nbytes()) in saved
    assert sum(num_bytes for _, num_bytes in saved) - own.nbytes() < 64 * NUM_TOKENS
    with PeakBytes() as backward:
        value_T.sum().backward()

    vectors = 256 * NUM_TOKENS
    assert forward.peak < MAX_TEMPORARY_BYTES + vectors
    assert backward.peak < MAX_TEMPORARY_BYTES + own.nbytes() + vectors  # the gradient, in the logits' dtype
    assert 4 * logits_TV.numel() > MAX_TEMPORARY_BYTES  # it is less than one float32 copy
