"""Wraps a model so that its parameters and gradients live in flat buffers, reduced over their replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finite_check import FiniteCheck, NonFiniteGrads
from megatron.core.distributed.overlap import GradSync, wait_before_use
from megatron.core.distributed.param_and_grad_buffer import FrozenParams, ParamAndGradBuffer, frozen_params
from megatron.core.parallel_state import ProcessGroups
from megatron.core.transformer.transformer_config import TransformerConfig


class DistributedDataParallel(nn.Module):
    """Forward is the module's own. Each backward adds to ``param.main_grad`` and frees ``param.grad``.

    Dense parameters are reduced over ``groups.dp_cp``, those with ``allreduce=False`` (experts) over ``groups.edp``.
    The reduction is a sum when ``config.calculate_per_token_loss`` (the caller has normalised the loss), else the mean
    over data parallel ranks (the ranks of one CP group hold terms of one replica's sum). Parameters that need no
    gradient when this is made are frozen: they have no gradient buffer and no optimizer state.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        groups: ProcessGroups,
    ) -> None:
        super().__init__()
        self.config = config
        self.ddp_config = ddp_config
        self.module = module
        self.groups = groups
        # This holds for experts too: their replicas may be TP and CP ranks, which saw parts of the same tokens, not
        # more tokens.
        self.grad_scale = 1.0 if config.calculate_per_token_loss else 1.0 / groups.layout.data_parallel_size
        self.grads_are_final = False
        named = list(module.named_parameters())
        places = {name: place for place, (name, _) in enumerate(named)}
        self.param_and_grad_buffers = _make_buffers(named, places, ddp_config, groups)
        self.frozen_params = frozen_params(named)
        self._finite_check = FiniteCheck(self.param_and_grad_buffers, places, groups.rank)
        self._micro_batch: int | None = None
        self._grad_sync = GradSync(self.param_and_grad_buffers, self._start_reduction)
        self._is_last_backward = True
        params = dict(named)
        for index, buffer in enumerate(self.param_and_grad_buffers):
            for name in buffer.param_ranges:
                params[name].register_post_accumulate_grad_hook(self._accumulate_into_main_grad(index, name))
        if ddp_config.overlap_param_gather:
            wait_before_use(module, self.param_and_grad_buffers)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; the parameters must be on the device."""
        assert all(item.params.is_resident for item in self._flat_params()), "parameters are offloaded"
        return self.module(*inputs, **kwargs)

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Hand the pipeline stage its input."""
        self.module.set_input_tensor(input_tensor)  # type: ignore[operator]

    def zero_grad_buffer(self) -> None:
        """Start a new step and set all gradients to zero."""
        self.grads_are_final = False
        self._grad_sync.reset()
        self._finite_check.reset()
        for buffer in self.param_and_grad_buffers:
            buffer.grads.tensor.zero_()

    @contextmanager
    def backward_of(self, micro_batch: int, is_last: bool) -> Iterator[None]:
        """A context for the backward of one micro-batch; ``check_for_nan_in_grad`` checks the gradients afterwards.

        Only the last backward of a step (``is_last``) starts reductions, with ``overlap_grad_reduce``.
        """
        self._micro_batch, self._is_last_backward = micro_batch, is_last
        try:
            yield
        finally:
            self._is_last_backward = True
        if self.ddp_config.check_for_nan_in_grad:
            kept = [buffer for buffer in self.param_and_grad_buffers if not self._grad_sync.has_started(buffer)]
            self._finite_check.look(kept, micro_batch)
        self._micro_batch = None

    @property
    def non_finite_grads(self) -> NonFiniteGrads | None:
        """What ``check_for_nan_in_grad`` found on this rank in this step, before anything was reduced."""
        return self._finite_check.found

    def finish_grad_sync(self) -> None:
        """Reduce the gradients over the replicas; collective over dp and edp. Part of ``finalize_model_grads``."""
        assert not self.grads_are_final, "these gradients were reduced already; zero_grad_buffer() starts a new step"
        self.grads_are_final = True
        self._grad_sync.finish()

    def start_param_sync(self) -> None:
        """Make all parameters current after every rank has updated its shards; collective over dp and edp.

        With ``overlap_param_gather`` this only starts the gather. The module's forward and its state dicts wait by
        themselves; code that reads parameters in another way must call ``finish_param_sync`` first.
        """
        for buffer in sorted(self.param_and_grad_buffers, key=lambda buffer: buffer.first_param):
            buffer.start_param_gather()
        if not self.ddp_config.overlap_param_gather:
            self.finish_param_sync()

    def finish_param_sync(self) -> None:
        """Wait until all parameters are current."""
        for buffer in self.param_and_grad_buffers:
            buffer.wait_for_params()

    def offload_params(self) -> None:
        """Move the parameters to the host and free their device storage."""
        self.finish_param_sync()
        for item in self._flat_params():
            item.params.offload()

    def onload_params(self) -> None:
        """Bring the parameters back; every parameter is the same object, with the same values."""
        for item in self._flat_params():
            item.params.onload()

    def offload_grads(self) -> None:
        """Free the gradients' storage; their values are lost."""
        for buffer in self.param_and_grad_buffers:
            buffer.grads.offload(keep_values=False)

    def onload_grads(self) -> None:
        for buffer in self.param_and_grad_buffers:
            buffer.grads.onload(keep_values=False)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's state, under the module's names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the module's state, under the module's names."""
        return self.module.load_state_dict(*args, **kwargs)

    def _flat_params(self) -> list[ParamAndGradBuffer | FrozenParams]:
        return [*self.param_and_grad_buffers, *self.frozen_params]

    def _start_reduction(self, buffer: ParamAndGradBuffer) -> None:
        if self.ddp_config.check_for_nan_in_grad:
            self._finite_check.look([buffer], self._micro_batch)
        buffer.start_grad_sync(self.grad_scale)

    def _accumulate_into_main_grad(self, index: int, name: str) -> Callable[[nn.Parameter], None]:
        owner = ref(self)  # the garbage collector does not follow a parameter's hooks

        def hook(param: nn.Parameter) -> None:
            ddp = owner()
            assert ddp is not None, f"a gradient of {name} without its DistributedDataParallel"
            buffer = ddp.param_and_grad_buffers[index]
            assert buffer.grads.is_resident, f"backward while the gradients of {buffer.name} are offloaded"
            assert not ddp._grad_sync.has_started(buffer), (
                f"a gradient of {name} after its reduction has started: with overlap_grad_reduce all backwards of a "
                "step but the last run inside backward_of(..., is_last=False)"
            )
            grad, param.grad = param.grad, None
            # NPU-ADAPTATION(gmm-adds-main-grad): Ascend's kernel of the experts' weight gradients adds them to float32
            # sums itself, and what autograd carries has no values; drop when grouped_matmul does so on every device.
            if param.grad_added_to_main_grad:  # type: ignore[attr-defined]
                grad, param.grad_added_to_main_grad = None, False  # type: ignore[attr-defined]
            # NPU-ADAPTATION END
            if grad is not None:
                param.main_grad.add_(grad)  # type: ignore[attr-defined]
            ddp._finite_check.mark_written(buffer)
            if ddp.ddp_config.overlap_grad_reduce and ddp._is_last_backward:
                ddp._grad_sync.arrived(buffer, name)

        return hook


def _make_buffers(
    named: Sequence[tuple[str, nn.Parameter]],
    places: Mapping[str, int],
    ddp_config: DistributedDataParallelConfig,
    groups: ProcessGroups,
) -> list[ParamAndGradBuffer]:
    kinds: dict[tuple[bool, torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, param in named:
        if param.requires_grad:
            kind = not getattr(param, "allreduce", True), param.dtype, getattr(param, "has_own_norm", False)
            kinds.setdefault(kind, []).append((name, param))
    return [
        ParamAndGradBuffer(
            name,
            params,
            groups.edp if is_expert else groups.dp_cp,
            is_expert=is_expert,
            grad_dtype=torch.float32 if ddp_config.grad_reduce_in_fp32 else dtype,
            is_sharded=ddp_config.use_distributed_optimizer,
            first_param=places[params[0][0]],
        )
        # Every rank must reduce its buffers in the same order, also a stage whose first parameter is an expert's.
        for (is_expert, dtype, has_own_norm), of_kind in sorted(kinds.items(), key=lambda kind: str(kind[0]))
        for name, params in _buckets(_kind_name(is_expert, dtype, has_own_norm), of_kind, ddp_config.bucket_size)
    ]


def _kind_name(is_expert: bool, dtype: torch.dtype, has_own_norm: bool) -> str:
    norm = "_own_norm" if has_own_norm else ""
    return f"{'expert' if is_expert else 'dense'}_{str(dtype).removeprefix('torch.')}{norm}"


def _buckets(
    name: str, params: Sequence[tuple[str, nn.Parameter]], bucket_size: int
) -> list[tuple[str, list[tuple[str, nn.Parameter]]]]:
    """Group neighbouring parameters into buckets; a bucket ends when it has ``bucket_size`` elements or more.

    An ``alone`` embedding has a bucket of its own. Where two stages share it, its shards then have the same bounds on
    both, so that the two stages' shards of its gradient can be summed.
    """
    alone = [item for item in params if getattr(item[1], "alone", False)]
    buckets: list[list[tuple[str, nn.Parameter]]] = [[]]
    numel = 0
    for item in params:
        if getattr(item[1], "alone", False):
            continue
        if numel >= bucket_size:
            buckets.append([])
            numel = 0
        buckets[-1].append(item)
        numel += item[1].numel()
    named = [(f"{name}.embedding", [item]) for item in alone]
    if len(buckets) == 1:
        return named + ([(name, buckets[0])] if buckets[0] else [])
    return named + [(f"{name}.{index}", bucket) for index, bucket in enumerate(buckets)]
