"""What the engines' communicators ask of HCCL, as CANN gets to see it."""

from __future__ import annotations

import npusim
import pytest
import torch
import torch.distributed as dist

from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import connect, destroy_model_parallel, initialize_from_layout
from mindspeed.core.hccl_buffer import HcclGroups
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


def _gathered_int64() -> list[list[int]]:
    """What a TP group of 2 gathers of numbers that need all 64 bits."""
    config = ParallelConfig(2, 1, True, rank=dist.get_rank(), world_size=2)
    state = init_model_parallel(config, resolve_platform("npu").group_options)
    numbers = torch.tensor([2**40 + dist.get_rank(), -1], device="npu")
    found: list[list[int]] = state.tp.all_gather(numbers).tolist()
    assert npusim.communicators()[-1].expansion_mode == VECTOR_CORES
    state.destroy()
    return found


def test_a_group_of_the_vector_cores_gathers_int64() -> None:
    assert run_ranks(_gathered_int64, 2, device="npu") == [[[2**40, -1], [2**40 + 1, -1]]] * 2


def _free_bytes() -> int:
    free_bytes: int = torch.npu.mem_get_info()[0]
    return free_bytes


def _training_buffers() -> tuple[dict[str, int], int, int]:
    """The buffers that groups ask for, the sum of what they should take, and what the device has lost."""
    backend, device = HcclGroups(), torch.device("npu", dist.get_rank())
    layout = ParallelLayout(world_size=2, expert_model_parallel_size=2)
    groups = initialize_from_layout(layout, backend=backend)
    torch.zeros(1, device=device)
    before, num_before = _free_bytes(), len(npusim.communicators())
    names = connect(groups, device)
    taken = before - _free_bytes()
    asked = [settings.buffer_mib for settings in npusim.communicators()[num_before:]]
    destroy_model_parallel()
    return dict(zip(names, asked, strict=True)), sum(map(backend.buffer_bytes, names)), taken


def test_training_groups_have_buffers_of_their_own_which_are_counted() -> None:
    for asked, counted, taken in run_ranks(_training_buffers, 2, device="npu"):
        assert asked == {"dp": 32, "dp_cp": 200, "tp_dp_cp": 32, "ep": 400, "etp_ep": 400, "world": 200}
        assert taken == counted == 2 * sum(asked.values()) << 20


def _engine_buffers() -> tuple[dict[str, int], int]:
    """What the engine's groups should take, and what the device has lost."""
    platform, device = resolve_platform("npu"), torch.device("npu", dist.get_rank())
    config = ParallelConfig(2, 1, True, rank=dist.get_rank(), world_size=2, expert_exchange="dispatch")
    state = init_model_parallel(config, platform.group_options)
    torch.zeros(1, device=device)
    before = _free_bytes()
    state.connect(device)
    taken = before - _free_bytes()
    counted = {name: platform.group_buffer_bytes(name) >> 20 for name in state.used_groups()}
    state.destroy()
    return counted, taken >> 20


def test_the_buffers_of_the_engines_groups_exist_before_its_cache() -> None:
    for counted, taken in run_ranks(_engine_buffers, 2, device="npu"):
        assert counted == {"tp": 128, "exchange": 400}
        assert taken == sum(counted.values())


def _int64() -> list[list[int]]:
    config = ParallelConfig(2, 1, True, rank=dist.get_rank(), world_size=2)
    state = init_model_parallel(config, resolve_platform("npu").group_options)
    mine = torch.tensor([dist.get_rank(), -(2**40)], device="npu")
    gathered = state.tp.all_gather(mine).tolist()
    with pytest.raises(RuntimeError, match="64-bit"):
        dist.all_gather_into_tensor(torch.empty(4, dtype=torch.int64, device="npu"), mine, group=state.tp.group)
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
