"""What the engines' communicators ask of HCCL, as CANN gets to see it."""

from __future__ import annotations

import npusim
import pytest
import torch
import torch.distributed as dist

from tests.npu.processes import output_of
from tests.parallel.launcher import run_ranks
from vllm.config import ParallelConfig
from vllm.distributed.parallel_state import init_model_parallel
from vllm.platforms import resolve_platform
from vllm_ascend.platform import VECTOR_CORES


def _modes() -> list[dict[str, int]]:
    """The expansion modes of a rank's groups as 2 TP and as 2 DP; the first collective makes the communicator."""
    found = []
    for tp, dp in ((2, 1), (1, 2)):
        config = ParallelConfig(tp, dp, True, rank=dist.get_rank(), world_size=2, expert_exchange="dispatch")
        state = init_model_parallel(config, resolve_platform("npu").group_options)
        modes = {}
        for name in ("tp", "dp", "ep", "exchange"):
            group = getattr(state, name)
            if group.group is not None:
                group.all_reduce(torch.ones(4, device="npu"))
                modes[name] = npusim.communicators()[-1].expansion_mode
        found.append(modes)
        state.destroy()
    return found


def test_the_groups_of_a_decode_step_run_on_the_vector_cores() -> None:
    by_tp = {"tp": VECTOR_CORES, "ep": VECTOR_CORES, "exchange": 0}
    by_dp = {"dp": 0, "ep": VECTOR_CORES, "exchange": 0}
    assert run_ranks(_modes, 2, device="npu") == [[by_tp, by_dp]] * 2


def _int64() -> list[list[int]]:
    config = ParallelConfig(2, 1, True, rank=dist.get_rank(), world_size=2)
    state = init_model_parallel(config, resolve_platform("npu").group_options)
    mine = torch.tensor([dist.get_rank(), -(2**40)], device="npu")
    gathered = state.tp.all_gather(mine).tolist()
    with pytest.raises(RuntimeError, match="64-bit"):
        state.tp.all_reduce(mine)
    state.destroy()
    return gathered


def test_int64_reaches_the_others_over_the_vector_cores_which_take_none() -> None:
    assert run_ranks(_int64, 2, device="npu") == [[[0, -(2**40)], [1, -(2**40)]]] * 2


def test_hccl_waits_as_long_as_torch() -> None:
    code = """
        import os, socket
        from verl.utils.distributed import join_world

        for name in ("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT"):
            os.environ.pop(name, None)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        join_world("npu", timeout_s=9000)
        print(os.environ["HCCL_CONNECT_TIMEOUT"], os.environ["HCCL_EXEC_TIMEOUT"])
    """
    assert output_of(code).split() == ["7200", "9000"]  # the longest that HCCL takes, and nccl_timeout itself
