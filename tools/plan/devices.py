"""What one device, its links and its node can do: a small profile file each, in ``devices/`` or anywhere else."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

PROFILES = Path(__file__).with_name("devices")
KINDS = {"ascend": "npu", "cuda": "cuda", "cpu": "cpu"}  # family of a device -> trainer.device
FAMILIES = tuple(KINDS)
_LINK_KEYS = ("domain_link", "scale_out_link")
LINKS = ("node", "domain", "cluster")  # between two devices, by what they have in common
GIB = 1 << 30
RESERVED_BYTES = {"ascend": 4 << 30, "cuda": 2 << 30, "cpu": 0}  # of the driver and contexts: modelled


@dataclass(frozen=True)
class Link:
    """A way between two devices: bytes a second of one device and direction, and seconds before the first byte."""

    gbs: float
    latency_us: float

    @property
    def bytes_per_s(self) -> float:
        """Rate of one device, one direction."""
        return self.gbs * 1e9

    @property
    def latency_s(self) -> float:
        """Seconds before the first byte."""
        return self.latency_us * 1e-6


@dataclass(frozen=True)
class DeviceProfile:
    """One device as the planner sees it; published peaks, no efficiencies (those are in ``timing/constants.toml``)."""

    name: str  # for people
    family: str  # whose software runs on it; chooses the efficiencies
    memory_gib: float  # of one device, as its driver shows it
    host_memory_gib: float  # of a node's host, which its devices share
    host_memory_gbs: float  # rate of that memory
    peak_bf16_tflops: float  # dense matrix products
    hbm_gbs: float  # device memory, GB/s
    devices_per_node: int  # devices that share a host
    domain_devices: int  # consecutive devices joined by the fast links, which may reach over nodes
    domain_link: Link  # inside such a domain
    scale_out_link: Link  # between two domains
    host_link_gbs: float  # device memory to host memory, one direction, with every device of the node at it
    peak_fp8_tflops: float = 0.0  # 0 without FP8

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)

    @property
    def reserved_bytes(self) -> int:
        """What the software below torch takes for itself of that memory."""
        return RESERVED_BYTES[self.family]

    @property
    def budget_bytes(self) -> int:
        """The memory for a worker's tensors."""
        return self.memory_bytes - self.reserved_bytes

    @property
    def host_memory_bytes(self) -> int:
        return int(self.host_memory_gib * GIB)

    @property
    def peak_flops(self) -> float:
        """bf16 floating-point operations a second, dense."""
        return self.peak_bf16_tflops * 1e12

    @property
    def hbm_bytes_per_s(self) -> float:
        return self.hbm_gbs * 1e9

    @property
    def host_link_bytes_per_s(self) -> float:
        """Rate between device and host memory, one direction."""
        return self.host_link_gbs * 1e9

    def slowest_link(self, first: int, last: int) -> str:
        """What joins the devices of ranks from ``first`` to ``last``: one of ``LINKS``."""
        if first // self.devices_per_node == last // self.devices_per_node:
            return "node"
        return "domain" if first // self.domain_devices == last // self.domain_devices else "cluster"


def known_devices() -> list[str]:
    """Names that ``load_device`` takes."""
    return sorted(path.stem for path in PROFILES.glob("*.toml"))


def load_device(device: str) -> DeviceProfile:
    """The profile called ``device`` (``a3``), or of the file at that path (``./mine.toml``).

    Raises ValueError that lists every unknown name, missing key and impossible value.
    """
    path, raw = _read(device)
    if problems := _problems(raw):
        raise ValueError(f"{path} has {len(problems)} problem(s):\n" + "\n".join(f"  - {line}" for line in problems))
    return DeviceProfile(**{**raw, **{key: Link(**raw[key]) for key in _LINK_KEYS}})


def _read(device: str) -> tuple[Path, dict[str, Any]]:
    """The file of a profile, and its values over those of the profile that its key ``like`` names, if it has one."""
    is_path = device.endswith(".toml") or "/" in device
    path = Path(device).expanduser() if is_path else PROFILES / f"{device}.toml"
    if not path.is_file():
        known = ", ".join(known_devices())
        wanted = f"no file {device}" if is_path else f"no device {device!r}"
        raise ValueError(f"{wanted}; known devices: {known}; or give the path of a profile, such as ./mine.toml")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8, or not TOML
        raise ValueError(f"{path} is not TOML: {error}") from None
    base = raw.pop("like", None)
    return path, raw if base is None else _read(str(base))[1] | raw


def _problems(raw: dict[str, Any]) -> list[str]:
    found = _unknown_or_missing(raw, DeviceProfile)
    if raw.get("family", FAMILIES[0]) not in FAMILIES:
        found.append(f"family is {raw['family']!r}; expected one of {', '.join(FAMILIES)}")
    numbers = {key: value for key, value in raw.items() if key not in ("name", "family", *_LINK_KEYS)}
    for key in [key for key in _LINK_KEYS if key in raw]:
        if isinstance(raw[key], dict):
            found += _unknown_or_missing(raw[key], Link, f"{key}.")
            numbers |= {f"{key}.{name}": value for name, value in raw[key].items()}
        else:
            found.append(f"{key} is {raw[key]!r}; expected a table with gbs and latency_us")
    found += [
        f"{key} is {value!r}; expected a number above 0"
        for key, value in numbers.items()
        if not (isinstance(value, int | float) and value > 0)
    ]
    node, domain = raw.get("devices_per_node"), raw.get("domain_devices")
    if isinstance(node, int) and isinstance(domain, int) and domain < node:
        found.append(f"domain_devices is {domain}, below devices_per_node {node}: the fast links join at least a node")
    return found


def _unknown_or_missing(raw: dict[str, Any], of: type, prefix: str = "") -> list[str]:
    known = {field.name: field.default is MISSING for field in fields(of)}
    found = [
        f"unknown key {prefix}{key}; the nearest known key is "
        f"{prefix}{difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]}"
        for key in raw
        if key not in known
    ]
    return found + [f"{prefix}{key} is missing" for key, is_needed in known.items() if is_needed and key not in raw]
