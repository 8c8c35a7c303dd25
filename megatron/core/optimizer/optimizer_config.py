"""Hyper-parameters of the optimizer, under upstream's field names."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (arXiv 1711.05101) with clipping by the global norm.

    lr is what a run without scheduler uses; with one, the scheduler sets the rate of each step and min_lr is its lower
    end. clip_grad 0 means no clipping. weight_decay acts on matrices only, not on norm weights and biases.
    on_non_finite_grads (ours): "skip" the step when the gradient norm is NaN or infinite, twice in a row at most, or
    "stop" the run at the first.

    use_precision_aware_optimizer: state in the dtypes below instead of float32; each update runs in float32. Moments
    may be bfloat16; a bfloat16 exp_avg_sq forgets only when 1 - adam_beta2 is above its rounding, so that is checked.
    main_grads_dtype bfloat16 halves what CPU Adam copies to the host. Upstream's scaled float16 and uint8 states do
    not exist here.
    optimizer_cpu_offload: keep optimizer_offload_fraction of the state on the host and update it there (CPU Adam) ·
    overlap_cpu_optimizer_d2h_h2d: copy gradients and weights beside the CPU's work · pin_cpu_grads, pin_cpu_params:
    page-lock the memory through which they travel.
    """

    lr: float = 1e-6
    min_lr: float = 0.0
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    use_distributed_optimizer: bool = True
    on_non_finite_grads: str = "skip"
    use_precision_aware_optimizer: bool = False
    main_grads_dtype: torch.dtype = torch.float32
    main_params_dtype: torch.dtype = torch.float32
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 1.0
    overlap_cpu_optimizer_d2h_h2d: bool = False
    pin_cpu_grads: bool = True
    pin_cpu_params: bool = True

    @property
    def state_dtypes(self) -> dict[str, torch.dtype]:
        """Dtype of each part of the state, in the order and under the names of ``ShardState``."""
        return {"master": self.main_params_dtype, "exp_avg": self.exp_avg_dtype, "exp_avg_sq": self.exp_avg_sq_dtype}

    def __post_init__(self) -> None:
        found = [
            f"{name} is {getattr(self, name)}; it must be at least 0"
            for name in ("lr", "min_lr", "weight_decay", "clip_grad")
            if not getattr(self, name) >= 0
        ]
        if self.min_lr > self.lr:
            found.append(f"min_lr is {self.min_lr}; it must not be above lr {self.lr}")
        found.extend(
            f"{name} is {getattr(self, name)}; it must be in [0, 1)"
            for name in ("adam_beta1", "adam_beta2")
            if not 0 <= getattr(self, name) < 1
        )
        if not self.adam_eps > 0:
            found.append(f"adam_eps is {self.adam_eps}; it must be above 0")
        if self.on_non_finite_grads not in ("skip", "stop"):
            found.append(f"on_non_finite_grads is {self.on_non_finite_grads!r}; it must be 'skip' or 'stop'")
        found += self._dtype_problems()
        if not 0 <= self.optimizer_offload_fraction <= 1:
            found.append(f"optimizer_offload_fraction is {self.optimizer_offload_fraction}; it must be in [0, 1]")
        if found:
            raise ValueError("optimizer config: " + "; ".join(found))

    def _dtype_problems(self) -> list[str]:
        found = []
        for name, allowed in _STATE_DTYPES.items():
            dtype = getattr(self, name)
            if dtype not in allowed:
                found.append(f"{name} is {dtype}; it must be {' or '.join(map(str, allowed))}")
            elif dtype != torch.float32 and not self.use_precision_aware_optimizer:
                found.append(f"{name} is {dtype}; that needs use_precision_aware_optimizer")
        smallest_change = torch.finfo(torch.bfloat16).eps / 2
        if self.exp_avg_sq_dtype == torch.bfloat16 and 1 - self.adam_beta2 <= smallest_change:
            found.append(
                f"adam_beta2 is {self.adam_beta2} with exp_avg_sq_dtype torch.bfloat16, which cannot hold a change by "
                f"less than {smallest_change:.4f} of itself; lower adam_beta2 or keep torch.float32"
            )
        return found


_STATE_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "main_grads_dtype": (torch.float32, torch.bfloat16),
    "main_params_dtype": (torch.float32,),
    "exp_avg_dtype": (torch.float32, torch.bfloat16),
    "exp_avg_sq_dtype": (torch.float32, torch.bfloat16),
}
