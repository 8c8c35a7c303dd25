"""Network interfaces of this host, and which of them a run should talk over."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

# Interfaces that lead to no other host of a cluster.
VIRTUAL = ("lo", "docker", "br-", "veth", "virbr", "cni", "flannel", "tun", "tap")


@dataclass(frozen=True)
class Interface:
    """One interface that is up and has an IPv4 address."""

    name: str
    address: str
    speed_mbit: int  # 0 when the driver does not say

    @property
    def is_virtual(self) -> bool:
        return self.name.startswith(VIRTUAL)


def interfaces() -> list[Interface]:
    """Every interface that is up and has an IPv4 address, in the system's order."""
    stats = psutil.net_if_stats()
    return [
        Interface(name, address.address, stats[name].speed)
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET and name in stats and stats[name].isup
    ]


def choose(found: Iterable[Interface], master_addr: str | None = None, asked: str | None = None) -> Interface | None:
    """The interface for SOCKET_IFNAME: the one asked for, else one that reaches the master, else the fastest real one.

    ``master_addr`` may be a name or an address. None when no interface fits (an asked-for name that is not there, too).
    """
    found = list(found)
    if asked:
        return next((item for item in found if item.name == asked), None)
    if master_addr:
        source = _source_address(master_addr)
        reaching = next((item for item in found if item.address == source), None)
        if reaching is not None:
            return reaching
    real = [item for item in found if not item.is_virtual]
    return max(real, key=lambda item: item.speed_mbit, default=next(iter(found), None))


def _source_address(host: str) -> str | None:
    """The local address that packets to ``host`` would leave from; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        address: str = probe.getsockname()[0]
        return address


def port_problem(port: int) -> str | None:
    """Why this host cannot listen on ``port``; None when it can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return os.strerror(error.errno or 0).lower()
    return None
