"""The process group of all ranks of a job."""

from __future__ import annotations

import datetime
import math
import os
import socket

import torch.distributed as dist

from verl.utils.device import dist_backend
from verl.utils.net_utils import LOOPBACK

HCCL_CONNECT_RANGE_S = (120, 7200)  # what HCCL_CONNECT_TIMEOUT may be


def join_world(device_type: str, timeout_s: float) -> None:
    """Joins the world that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe, unless this process has.

    With MASTER_ADDR 127.0.0.1 the store and gloo listen on the loopback interface only.
    """
    if dist.is_initialized():
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = datetime.timedelta(seconds=timeout_s)
    if device_type == "npu":
        _set_hccl_timeouts(timeout_s)
    store = None
    if os.environ.get("MASTER_ADDR") == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = _loopback_store(int(os.environ["MASTER_PORT"]), rank, timeout)
    dist.init_process_group(dist_backend(device_type), store=store, rank=rank, world_size=world_size, timeout=timeout)


def world_group() -> dist.ProcessGroup:
    """The group of all ranks, after ``join_world``."""
    group = dist.group.WORLD
    assert group is not None, "join_world makes it"
    return group


def _set_hccl_timeouts(timeout_s: float) -> None:
    """HCCL's own clocks, which torch's time-out does not reach; variables that the user has set stay.

    A communicator is made by the first collective of its group, so connecting waits for late ranks, too.
    """
    shortest, longest = HCCL_CONNECT_RANGE_S
    os.environ.setdefault("HCCL_CONNECT_TIMEOUT", str(int(min(max(timeout_s, shortest), longest))))
    os.environ.setdefault("HCCL_EXEC_TIMEOUT", str(math.ceil(timeout_s)))


def _loopback_store(port: int, rank: int, timeout: datetime.timedelta) -> dist.TCPStore:
    """A store whose server, in rank 0, listens on loopback; one that torch starts itself listens on all addresses."""
    if rank:
        return dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timeout)
    listener = socket.create_server((LOOPBACK, port))
    return dist.TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=False,  # torch 2.5's server with libuv opens a socket of its own
    )
