"""Collectives by where the ranks of their group stand: seconds = latency x steps + bytes / rate of the slowest way."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2

from megatron.core.parallel_layout import ParallelLayout
from tools.plan.devices import DeviceProfile, Link


@dataclass(frozen=True)
class Group:
    """A communication group as the links see it: its size, and how many of its ranks share a fast domain."""

    size: int
    per_domain: int

    @property
    def is_in_domain(self) -> bool:
        """Whether the fast links join all of it."""
        return self.per_domain >= self.size


@lru_cache(maxsize=4096)
def layout_group(layout: ParallelLayout, axes: tuple[str, ...], is_expert: bool, domain_devices: int) -> Group:
    """The group of rank 0 along ``axes``; ranks stand in the order of their devices."""
    ranks = layout.members(0, axes, is_expert)
    return Group(len(ranks), sum(rank < domain_devices for rank in ranks))


def consecutive_group(size: int, domain_devices: int) -> Group:
    """A group of ranks that stand side by side."""
    return Group(size, min(size, domain_devices))


@dataclass(frozen=True)
class Links:
    """The links of a device with the share of their rate that collectives reach."""

    domain: Link
    scale_out: Link
    efficiency: float

    @staticmethod
    def of(device: DeviceProfile, efficiency: float) -> Links:
        """The links of ``device``."""
        return Links(device.domain_link, device.scale_out_link, efficiency)

    def all_to_all(self, num_bytes: float, group: Group) -> float:
        """Seconds for each rank to send ``num_bytes`` spread evenly over the group, itself included."""
        if group.size <= 1:
            return 0.0
        inside = num_bytes * (group.per_domain - 1) / group.size
        outside = num_bytes * (group.size - group.per_domain) / group.size
        fast, slow = self._seconds(inside, self.domain), self._seconds(outside, self.scale_out)
        return max(fast, slow) + self._link(group).latency_s

    def gather(self, num_bytes: float, group: Group) -> float:
        """Seconds of an all-gather that gives each rank ``num_bytes`` in all, or of the reduce-scatter of as many.

        In two levels where the group leaves the domain: each rank's rail carries its part of what comes from outside.
        Inside a domain all ranks reach each other at once; between domains the steps are those of a tree.
        """
        if group.size <= 1:
            return 0.0
        inside = self._seconds(num_bytes * (group.per_domain - 1) / group.per_domain, self.domain)
        num_domains = ceil(group.size / group.per_domain)
        outside = self._seconds(num_bytes / group.per_domain * (num_domains - 1) / num_domains, self.scale_out)
        return inside + outside + self.domain.latency_s + self.scale_out.latency_s * ceil(log2(num_domains))

    def all_reduce(self, num_bytes: float, group: Group) -> float:
        """Seconds of an all-reduce of ``num_bytes``: a reduce-scatter and an all-gather."""
        return 2 * self.gather(num_bytes, group)

    def send(self, num_bytes: float, is_in_domain: bool) -> float:
        """Seconds from one rank to another."""
        link = self.domain if is_in_domain else self.scale_out
        return self._seconds(num_bytes, link) + link.latency_s

    def _link(self, group: Group) -> Link:
        return self.domain if group.is_in_domain else self.scale_out

    def _seconds(self, num_bytes: float, link: Link) -> float:
        return num_bytes / (link.bytes_per_s * self.efficiency)
