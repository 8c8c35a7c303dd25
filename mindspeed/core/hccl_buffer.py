"""What training groups ask of HCCL: communication buffers by what a group sends.

Source: the CANN manual's page on HCCL_BUFFSIZE and torch_npu's on hccl_buffer_size; MindSpeed's --hccl-group-buffer.
"""

from __future__ import annotations

import os
from typing import Any

from megatron.core.parallel_state import PAIR, GroupBackend

MIB = 1 << 20
DEFAULT_MIB, PAIR_DEFAULT_MIB = 200, 20  # HCCL's own, and torch_npu's for pairs
BUFFERS_OF_A_COMMUNICATOR = 2  # one to send from, one to receive into
LARGE_MIB, EXPERTS_MIB, SMALL_MIB = 200, 400, 32
# An all-to-all wants room for all that it moves, others for one message; sums of a few numbers need next to none. The
# world moves weights to the rollout engine and keeps HCCL_BUFFSIZE.
BUFFER_MIB = {
    "tp": LARGE_MIB,
    "cp": LARGE_MIB,
    "dp_cp": LARGE_MIB,
    "edp": LARGE_MIB,
    "etp": LARGE_MIB,
    "ep": EXPERTS_MIB,
    "etp_ep": EXPERTS_MIB,
    "dp": SMALL_MIB,
    "pp": SMALL_MIB,  # activations travel through communicators of two ranks, whose buffers are P2P_HCCL_BUFFSIZE
    "mp": SMALL_MIB,
    "tp_cp": SMALL_MIB,
    "tp_dp_cp": SMALL_MIB,
}


class HcclGroups(GroupBackend):
    """Buffers of a communicator are its own for as long as it lives: at 256 dies HCCL_BUFFSIZE for each of ten groups
    would take 6 GB of a die.
    """

    def options(self, group: str) -> Any:
        """See ``GroupBackend.options``."""
        import torch_npu

        options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
        options.hccl_config = {"hccl_buffer_size": BUFFER_MIB[group]}
        return options

    def buffer_bytes(self, group: str) -> int:
        """See ``GroupBackend.buffer_bytes``."""
        if group == PAIR:
            size = int(os.environ.get("P2P_HCCL_BUFFSIZE", PAIR_DEFAULT_MIB))
        else:
            size = BUFFER_MIB.get(group) or int(os.environ.get("HCCL_BUFFSIZE", DEFAULT_MIB))
        return BUFFERS_OF_A_COMMUNICATOR * size * MIB
