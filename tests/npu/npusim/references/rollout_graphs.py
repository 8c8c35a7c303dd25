"""What a recorded decode step calls: "torch_npu.npu_fused_infer_attention_score" with given outputs and workspace.

After the example of "torch_npu.npu.graph_task_update_begin" of the Ascend documentation. Simplified: the workspace is
as large as the host code makes it, and its contents are not used.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from npusim.reference import reference


@reference("_npu_fused_infer_attention_score_get_max_workspace")
def get_max_workspace(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> None:
    """-> a tensor of bytes, as the host code made it."""
