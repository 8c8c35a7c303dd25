"""What a node is in the run: the head or another one, and where it is reached."""

from __future__ import annotations

from dataclasses import dataclass

from tools.launch import network
from tools.launch.settings import Settings
from verl.utils.net_utils import LOOPBACK


@dataclass(frozen=True)
class NodeRole:
    """What this node is in the run: head or not, and the addresses and the interface that it uses."""

    is_head: bool
    own_addr: str
    master_addr: str
    interface: str


def find_role(settings: Settings, nnodes: int) -> NodeRole:
    """Head or not, and on which address; ValueError when the settings do not say. One node uses loopback alone."""
    addresses = network.own_addresses()
    master = None if settings.master_addr is None else network.resolve(settings.master_addr)
    if master is None and nnodes > 1:
        raise ValueError(
            f"the run has {nnodes} nodes (NNODES), but MASTER_ADDR is not set: set it to the head's address on "
            "every node, or NNODES=1 where this machine does everything"
        )
    given = settings.master_addr or ""
    if nnodes > 1 and (given == "localhost" or network.is_loopback(given)):
        raise ValueError(
            f"MASTER_ADDR is {given} and the run has {nnodes} nodes: every node would take itself for the head; "
            "give the head's name or address in the network"
        )
    is_head = master is None or network.is_own(master, addresses)
    if settings.node_rank is not None and (settings.node_rank == 0) != is_head:
        raise ValueError(
            f"NODE_RANK is {settings.node_rank}, but MASTER_ADDR {master} is {'' if is_head else 'not '}one of this "
            f"node's addresses ({', '.join(addresses)}): rank 0 is the node that owns MASTER_ADDR"
        )
    if settings.node_rank is not None and settings.node_rank >= nnodes:
        raise ValueError(f"NODE_RANK is {settings.node_rank} with NNODES {nnodes}: expected 0 to {nnodes - 1}")
    if not is_head and nnodes == 1:
        raise ValueError(
            f"MASTER_ADDR {master} is not an address of this machine and NNODES is 1: unset it, or set NNODES"
        )
    own = LOOPBACK if nnodes == 1 or master is None else master
    if settings.socket_ifname is not None or not is_head:
        own = network.address_towards(master, settings.socket_ifname)
    elif nnodes > 1 and network.is_loopback(own):  # Debian's /etc/hosts gives a host's own name as 127.0.1.1
        own = network.address_towards(None, None)
    if nnodes > 1 and network.is_loopback(own):
        raise ValueError(
            f"MASTER_ADDR {given} means {own} here, where other nodes cannot reach this one, and no "
            "interface that is up has another IPv4 address: give this node a network, or NNODES=1"
        )
    seen = own if nnodes == 1 or master is None or network.is_loopback(master) else master
    return NodeRole(is_head, own, seen, addresses.get(own, "lo"))
