"""Addresses and ports of this host, under vLLM's names; clients import them."""

from __future__ import annotations

import os
import socket


def get_ip() -> str:
    """The address under which other hosts reach this one: VLLM_HOST_IP where it is set."""
    given = os.environ.get("VLLM_HOST_IP")
    if given:
        return given
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        try:
            probe.connect(("192.0.2.1", 9))  # an address that nobody has: any outside this host's own network
        except OSError:
            return "127.0.0.1"  # a host without a route to others
        return str(probe.getsockname()[0])


def get_open_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
