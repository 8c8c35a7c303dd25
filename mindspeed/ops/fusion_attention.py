"""Flash attention over packed sequences (layout TND) as one kernel, whole or by blocks of keys.

Limits: float16, bfloat16 or float32; no empty sequence; N heads of queries, a divisor of N of keys; head sizes to 768.
The kernel takes the sequence ends as host integers: with ``cu_seqlens`` on the host no call waits for the device.
Tolerance: 1e-2 (bfloat16), 1e-5 (float32), relative. Backward: torch_npu's own (npu_fusion_attention_grad).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops.contract import Attended, Bounds

# The kernel reads causality from one fixed triangle of this size, whatever the sequence lengths are.
MASK_SIZE = 2048
NO_MASK, CAUSAL_FROM_THE_END = 0, 3  # sparse_mode
STATISTICS_WIDTH = 8  # the kernel takes every row's statistics eight times


class FusionAttention:
    """See ``megatron.core.ops.contract.CoreAttention``. Holds the causal triangle (4 MiB) of each device it ran on.

    pads_values: values narrower than keys (MLA) get zeros up to the keys' head size. Without it they go to the kernel
    as they are: a third less to read and write of values, outputs and their gradients, where CANN takes it.
    """

    def __init__(self, pads_values: bool = True) -> None:
        self.pads_values = pads_values
        self._masks: dict[torch.device, Tensor] = {}

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, causal: bool = True
    ) -> Tensor:
        return self._attend(q, k, v, (cu_seqlens, cu_seqlens), scale, causal)[0]

    def block(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float, causal: bool = True
    ) -> tuple[Tensor, Tensor]:
        """See ``contract.AttentionBlock``."""
        out, maximum, total = self._attend(q, k, v, bounds, scale, causal)
        return out, maximum[..., 0] + total[..., 0].log()

    def block_grad(
        self, grad_out: Tensor, attended: Attended, bounds: Bounds, scale: float, causal: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See ``contract.AttentionBlockGrad``: the kernel's weights are ``exp(scores - maximum) / sum``."""
        import torch_npu

        q, k, v, out, lse = attended
        value_size = v.shape[-1]
        v, out, grad_out = (self._padded(q, x) for x in (v, out, grad_out))
        maximum = lse.unsqueeze(-1).expand(-1, -1, STATISTICS_WIDTH).contiguous()
        grads = torch_npu.npu_fusion_attention_grad(
            q,
            k,
            v,
            grad_out,
            q.shape[1],
            "TND",
            atten_mask=self._causal_mask(q.device) if causal else None,
            softmax_max=maximum,
            softmax_sum=torch.ones_like(maximum),
            attention_in=out,
            scale_value=scale,
            actual_seq_qlen=bounds[0][1:].tolist(),
            actual_seq_kvlen=bounds[1][1:].tolist(),
            sparse_mode=CAUSAL_FROM_THE_END if causal else NO_MASK,
        )
        return grads[0], grads[1], grads[2][..., :value_size]

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, and the maximum and sum of weights of every row of scores, [Tq, N, 8] each."""
        import torch_npu

        value_size = v.shape[-1]
        out, maximum, total, *_ = torch_npu.npu_fusion_attention(
            q,
            k,
            self._padded(q, v),
            q.shape[1],
            "TND",
            atten_mask=self._causal_mask(q.device) if causal else None,
            scale=scale,
            actual_seq_qlen=bounds[0][1:].tolist(),
            actual_seq_kvlen=bounds[1][1:].tolist(),
            sparse_mode=CAUSAL_FROM_THE_END if causal else NO_MASK,
        )
        return out[..., :value_size], maximum, total

    def _padded(self, q: Tensor, x: Tensor) -> Tensor:
        """Values, outputs and their gradients [T, N, Dv] as the kernel takes them."""
        # NPU-ADAPTATION(fa-pad-value): the packed kernel wants one head size for q, k and v, and MLA has 192 and 128;
        # drop when the oldest CANN that we support takes them as they are.
        if self.pads_values and x.shape[-1] < q.shape[-1]:
            x = F.pad(x, (0, q.shape[-1] - x.shape[-1]))
        # NPU-ADAPTATION END
        return x

    def _causal_mask(self, device: torch.device) -> Tensor:
        if device not in self._masks:
            full = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device)
            self._masks[device] = full.triu(diagonal=1)  # True = masked
        return self._masks[device]
