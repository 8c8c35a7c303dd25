"""Wraps a model so that its parameters and gradients live in flat buffers, reduced over their replicas."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.overlap import GradSync, wait_before_use
from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer
from megatron.core.parallel_state import ProcessGroups
from megatron.core.transformer.transformer_config import TransformerConfig

logger = logging.getLogger(__name__)


class DistributedDataParallel(nn.Module):
    """Forward is the module's own. Each backward adds to ``param.main_grad`` and frees ``param.grad``.

    Dense parameters are reduced over ``groups.dp``, those with ``allreduce=False`` (experts) over ``groups.edp``.
    The reduction is a sum when ``config.calculate_per_token_loss`` (the caller has normalised the loss), else the mean
    over data parallel ranks. Raises ``ValueError`` for frozen parameters, which the buffers cannot hold.
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
        # Experts too: with TP > 1 their replicas include TP ranks, which saw parts of the same tokens, not more tokens.
        self.grad_scale = 1.0 if config.calculate_per_token_loss else 1.0 / groups.layout.data_parallel_size
        self.grads_are_final = False
        self.param_and_grad_buffers = _make_buffers(module, ddp_config, groups)
        self._grad_sync = GradSync(self.param_and_grad_buffers, self._start_reduction)
        self._is_last_backward = True
        params = dict(module.named_parameters())
        for buffer in self.param_and_grad_buffers:
            for name in buffer.param_ranges:
                params[name].register_post_accumulate_grad_hook(self._accumulate_into_main_grad(buffer, name))
        if ddp_config.overlap_param_gather:
            wait_before_use(module, self.param_and_grad_buffers)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; the parameters must be on the device."""
        assert all(buffer.params.is_resident for buffer in self.param_and_grad_buffers), "parameters are offloaded"
        return self.module(*inputs, **kwargs)

    def set_input_tensor(self, input_tensor: torch.Tensor | None) -> None:
        """Hand the pipeline stage its input."""
        self.module.set_input_tensor(input_tensor)  # type: ignore[operator]

    def zero_grad_buffer(self) -> None:
        """Start a new step: all gradients become zero."""
        self.grads_are_final = False
        self._grad_sync.reset()
        for buffer in self.param_and_grad_buffers:
            buffer.grads.tensor.zero_()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around every backward of a step but the last: with ``overlap_grad_reduce`` the last one starts reductions."""
        self._is_last_backward = False
        try:
            yield
        finally:
            self._is_last_backward = True

    def finish_grad_sync(self) -> None:
        """Reduce the gradients over the replicas; collective over dp and edp. Part of ``finalize_model_grads``."""
        assert not self.grads_are_final, "these gradients were reduced already; zero_grad_buffer() starts a new step"
        self.grads_are_final = True
        self._grad_sync.finish()

    def start_param_sync(self) -> None:
        """Make all parameters current after every rank has updated its shards; collective over dp and edp.

        With ``overlap_param_gather`` this only starts it. The module's forward and its state dicts wait by
        themselves; whoever reads parameters in another way calls ``finish_param_sync`` first.
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
        for buffer in self.param_and_grad_buffers:
            buffer.params.offload()

    def onload_params(self) -> None:
        """Bring the parameters back; every parameter is the same object, with the same values."""
        for buffer in self.param_and_grad_buffers:
            buffer.params.onload()

    def offload_grads(self) -> None:
        """Free the gradients' storage; their values are lost."""
        for buffer in self.param_and_grad_buffers:
            buffer.grads.offload(keep_values=False)

    def onload_grads(self) -> None:
        """Allocate the gradients again, as zeros."""
        for buffer in self.param_and_grad_buffers:
            buffer.grads.onload(keep_values=False)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's state, under the module's names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the module's state, under the module's names."""
        return self.module.load_state_dict(*args, **kwargs)

    def _start_reduction(self, buffer: ParamAndGradBuffer) -> None:
        if self.ddp_config.check_for_nan_in_grad:
            _report_non_finite(buffer, self.groups.rank)
        buffer.start_grad_sync(self.grad_scale)

    def _accumulate_into_main_grad(self, buffer: ParamAndGradBuffer, name: str) -> Callable[[nn.Parameter], None]:
        def hook(param: nn.Parameter) -> None:
            assert buffer.grads.is_resident, f"backward while the gradients of {buffer.name} are offloaded"
            assert not self._grad_sync.has_started(buffer), (
                f"a gradient of {name} after its reduction has begun: with overlap_grad_reduce all backwards of a step "
                "but the last run inside no_sync()"
            )
            if param.grad is not None:
                param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
                param.grad = None
            if self.ddp_config.overlap_grad_reduce and self._is_last_backward:
                self._grad_sync.arrived(buffer, name)

        return hook


def _make_buffers(
    module: nn.Module, ddp_config: DistributedDataParallelConfig, groups: ProcessGroups
) -> list[ParamAndGradBuffer]:
    frozen = [name for name, param in module.named_parameters() if not param.requires_grad]
    if frozen:
        raise ValueError(f"frozen parameters are not supported: {', '.join(frozen)}; set requires_grad on all")
    places = {name: place for place, (name, _) in enumerate(module.named_parameters())}
    kinds: dict[tuple[bool, torch.dtype], list[tuple[str, nn.Parameter]]] = {}
    for name, param in module.named_parameters():
        kinds.setdefault((not getattr(param, "allreduce", True), param.dtype), []).append((name, param))
    return [
        ParamAndGradBuffer(
            name,
            params,
            groups.edp if is_expert else groups.dp,
            is_expert=is_expert,
            grad_dtype=torch.float32 if ddp_config.grad_reduce_in_fp32 else dtype,
            is_sharded=ddp_config.use_distributed_optimizer,
            first_param=places[params[0][0]],
        )
        # Every rank must reduce its buffers in the same order, also a stage whose first parameter is an expert's.
        for (is_expert, dtype), of_kind in sorted(kinds.items(), key=lambda kind: str(kind[0]))
        for name, params in _buckets(_kind_name(is_expert, dtype), of_kind, ddp_config.bucket_size)
    ]


def _kind_name(is_expert: bool, dtype: torch.dtype) -> str:
    return f"{'expert' if is_expert else 'dense'}_{str(dtype).removeprefix('torch.')}"


def _buckets(
    name: str, params: list[tuple[str, nn.Parameter]], bucket_size: int
) -> list[tuple[str, list[tuple[str, nn.Parameter]]]]:
    """Neighbours together, each bucket closed by the parameter that makes it ``bucket_size`` elements or more."""
    buckets: list[list[tuple[str, nn.Parameter]]] = [[]]
    numel = 0
    for item in params:
        if numel >= bucket_size:
            buckets.append([])
            numel = 0
        buckets[-1].append(item)
        numel += item[1].numel()
    if len(buckets) == 1:
        return [(name, buckets[0])]
    return [(f"{name}.{index}", bucket) for index, bucket in enumerate(buckets)]


def _report_non_finite(buffer: ParamAndGradBuffer, rank: int) -> None:
    is_bad = ~torch.isfinite(buffer.grads.tensor)
    if is_bad.any():
        first = int(is_bad.int().argmax())
        logger.error(
            "rank %d: %d gradient values of %s are not finite before the reduction, the first in %s",
            rank,
            int(is_bad.sum()),
            buffer.name,
            buffer.find_param(first),
        )
