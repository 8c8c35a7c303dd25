"""Ports for servers that are started a moment after their port is chosen."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterable
from pathlib import Path

LOOPBACK = "127.0.0.1"  # MASTER_ADDR of a job whose ranks are all on one host
_FIRST, _LAST = 20000, 32767  # above the ports that Ray and services have by default, below Linux's ephemeral ones
_LEAST = 1000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int, avoid: Iterable[int] = ()) -> list[int]:
    """Returns ``count`` TCP ports, none of ``avoid``, that are free at this moment on every address of this machine.

    They are drawn at random from outside the system's ephemeral ports, any of which may belong to a connection or to a
    worker of Ray by the time that the server starts.

    Raises:
        OSError: fewer are free.
    """
    left = list(set(_candidates()) - set(avoid))
    random.Random().shuffle(left)  # not the seeded generator of a run
    found: list[int] = []
    for port in left:
        if len(found) == count:
            break
        if _is_free(port):
            found.append(port)
    if len(found) < count:
        raise OSError(errno.EADDRINUSE, f"{len(found)} of the {len(left)} ports tried are free; expected {count}")
    return found


def ray_is_up(log: Path) -> bool:
    """Whether ``ray start`` has printed into ``log`` that its node takes part; the head's port answers before that."""
    return log.is_file() and b"Ray runtime started" in log.read_bytes()


def accepts_connections(address: str, port: int, timeout_s: float = 1.0) -> bool:
    """Whether something listens at ``address:port``."""
    try:
        with socket.create_connection((address, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def _candidates() -> list[int]:
    """The ports to draw from: all of the range if almost all of it is ephemeral."""
    everything = list(range(_FIRST, _LAST + 1))
    if not _EPHEMERAL.exists():
        return everything
    lowest, highest = map(int, _EPHEMERAL.read_text(encoding="ascii").split())
    outside = [port for port in everything if not lowest <= port <= highest]
    return outside if len(outside) >= _LEAST else everything


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True
