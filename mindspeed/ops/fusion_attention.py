"""Flash attention over packed sequences (layout TND) as one kernel.

Limits: float16, bfloat16 or float32; no empty sequence; N heads on every side (no grouped heads); head sizes to 768.
The kernel takes the sequence ends as host integers: with ``cu_seqlens`` on the host no call waits for the device.
Tolerance: 1e-2 (bfloat16), 1e-5 (float32), relative. Backward: torch_npu's own (npu_fusion_attention_grad).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# The kernel reads causality from one fixed triangle of this size, whatever the sequence lengths are.
MASK_SIZE = 2048
NO_MASK, CAUSAL_FROM_THE_END = 0, 3  # sparse_mode


class FusionAttention:
    """See ``megatron.core.ops.contract.CoreAttention``. Holds the causal triangle (4 MiB) of each device it ran on."""

    def __init__(self) -> None:
        self._masks: dict[torch.device, torch.Tensor] = {}

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        scale: float,
        causal: bool = True,
    ) -> torch.Tensor:
        import torch_npu

        value_size = v.shape[-1]
        # NPU-ADAPTATION(fa-pad-value): the packed kernel wants one head size for q, k and v, and MLA has 192 and 128;
        # drop when the oldest CANN that we support takes them as they are.
        v = F.pad(v, (0, q.shape[-1] - value_size))
        # NPU-ADAPTATION END
        ends = cu_seqlens[1:].tolist()
        out: torch.Tensor = torch_npu.npu_fusion_attention(
            q,
            k,
            v,
            q.shape[1],
            "TND",
            atten_mask=self._causal_mask(q.device) if causal else None,
            scale=scale,
            actual_seq_qlen=ends,
            actual_seq_kvlen=ends,
            sparse_mode=CAUSAL_FROM_THE_END if causal else NO_MASK,
        )[0]
        return out[..., :value_size]

    def _causal_mask(self, device: torch.device) -> torch.Tensor:
        if device not in self._masks:
            full = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device)
            self._masks[device] = full.triu(diagonal=1)  # True = out of sight
        return self._masks[device]
