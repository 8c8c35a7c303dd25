"""Ports for servers that are started later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from verl.utils.net_utils import free_ports

EVERY_PORT = range(2**16)


def test_ports_are_not_those_that_the_system_gives_away() -> None:
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if lowest < 21_000:
        pytest.skip(f"this machine has too few ports outside its ephemeral ones, {lowest} to {highest}")
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert not [port for port in ports if lowest <= port <= highest]


def test_a_port_that_is_held_or_to_be_avoided_is_not_given() -> None:
    port = free_ports(1)[0]
    others = set(EVERY_PORT) - {port}
    assert free_ports(1, avoid=others) == [port]
    with socket.create_server(("127.0.0.1", port)), pytest.raises(OSError, match="0 of the 1 ports tried are free"):
        free_ports(1, avoid=others)
    with pytest.raises(OSError, match="expected 2"):
        free_ports(2, avoid=others)
