"""Addresses, interfaces and ports of this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import suppress


def own_addresses() -> dict[str, str]:
    """IPv4 address -> interface name, of every interface that is up."""
    import psutil  # --help, which comes before set-up, loads this module

    stats = psutil.net_if_stats()
    return {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and name in stats and stats[name].isup
    }


def resolve(host: str) -> str:
    """The IPv4 address of ``host``; ValueError when it has none."""
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"MASTER_ADDR {host!r} cannot be resolved ({error}); give the head node's IPv4 address"
        ) from error


def is_loopback(address: str) -> bool:
    """Whether an address means this machine on every machine: any 127.x, as /etc/hosts may give a host's own name."""
    return address.startswith("127.")


def is_own(address: str, addresses: Iterable[str]) -> bool:
    """Whether an address is this machine's: one of ``addresses``, those of its interfaces, or a loopback one."""
    return is_loopback(address) or address in addresses


def address_towards(peer: str | None, interface: str | None) -> str:
    """This machine's address on ``interface`` when named, else the one that packets to ``peer`` leave from."""
    addresses = own_addresses()
    if interface is not None:
        if interface in addresses.values():
            return next(address for address, name in addresses.items() if name == interface)
        known = ", ".join(f"{name} ({address})" for address, name in addresses.items())
        raise ValueError(
            f"SOCKET_IFNAME {interface!r} is no interface here that is up with an IPv4 address; there are {known}"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        with suppress(OSError):  # no route there
            probe.connect((peer if peer and not is_loopback(peer) else "192.0.2.1", 9))
            if not is_loopback(found := str(probe.getsockname()[0])):
                return found
        return next((address for address in addresses if not is_loopback(address)), "127.0.0.1")


def port_problem(name: str, port: int) -> str | None:
    """Why one cannot listen on ``port``, naming who holds it when that can be seen; None when one can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))  # all addresses, as Ray does: a listener on any of them is in the way
            return None
        except OSError as error:
            reason = error.strerror
    import psutil

    holder = ""
    with suppress(psutil.AccessDenied, psutil.NoSuchProcess):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                holder = f" (pid {connection.pid}, {psutil.Process(connection.pid).name()}, listens there)"
    return f"{name} {port} cannot be used on this machine: {reason}{holder}; set {name} to a free port"
