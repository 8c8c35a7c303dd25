"""What one device, its links and its node can do: a small profile file each, in ``devices/`` or anywhere else."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

PROFILES = Path(__file__).with_name("devices")
FAMILIES = ("ascend", "cuda", "cpu")
GIB = 1 << 30
RESERVED_BYTES = {"ascend": 4 << 30, "cuda": 2 << 30, "cpu": 0}  # driver, context and communicators' buffers: modelled


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
    """One device as the planner sees it; published peaks, no efficiencies (those are in ``timing/constants.toml``).

    Attributes:
        name: for people.
        family: whose software runs on it; chooses the efficiencies.
        memory_gib: of one device, as its driver shows it.
        host_memory_gib, host_memory_gbs: of a node, which its devices share.
        peak_bf16_tflops, peak_fp8_tflops: dense matrix products; no FP8 is 0.
        hbm_gbs: device memory, GB/s.
        devices_per_node: devices that share a host.
        domain_devices: consecutive devices joined by the fast links, which may reach over nodes.
        domain_link, scale_out_link: the links inside such a domain and between two of them.
        host_link_gbs: device memory to host memory, one direction, with every device of the node at it.
    """

    name: str
    family: str
    memory_gib: float
    host_memory_gib: float
    host_memory_gbs: float
    peak_bf16_tflops: float
    hbm_gbs: float
    devices_per_node: int
    domain_devices: int
    domain_link: Link
    scale_out_link: Link
    host_link_gbs: float
    peak_fp8_tflops: float = 0.0

    @property
    def memory_bytes(self) -> int:
        """Memory of one device."""
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
        """Memory of a node's host."""
        return int(self.host_memory_gib * GIB)

    @property
    def peak_flops(self) -> float:
        """bf16 floating-point operations a second, dense."""
        return self.peak_bf16_tflops * 1e12

    @property
    def hbm_bytes_per_s(self) -> float:
        """Rate of device memory."""
        return self.hbm_gbs * 1e9

    @property
    def host_link_bytes_per_s(self) -> float:
        """Rate between device and host memory, one direction."""
        return self.host_link_gbs * 1e9


def known_devices() -> list[str]:
    """Names that ``load_device`` takes."""
    return sorted(path.stem for path in PROFILES.glob("*.toml"))


def load_device(device: str) -> DeviceProfile:
    """The profile called ``device`` (``a3``), or of the file at that path (``./mine.toml``).

    Raises ValueError that lists every unknown name, missing key and impossible value.
    """
    is_path = device.endswith(".toml") or "/" in device
    path = Path(device).expanduser() if is_path else PROFILES / f"{device}.toml"
    if not path.is_file():
        known = ", ".join(known_devices())
        wanted = f"no file {device}" if is_path else f"no device {device!r}"
        raise ValueError(f"{wanted}; known devices: {known}; or give the path of a profile, such as ./mine.toml")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    problems = _problems(raw)
    if problems:
        raise ValueError(f"{path} has {len(problems)} problem(s):\n" + "\n".join(f"  - {line}" for line in problems))
    links = {key: Link(**raw[key]) for key in ("domain_link", "scale_out_link")}
    return DeviceProfile(**{**raw, **links})


def _problems(raw: dict[str, Any]) -> list[str]:
    known = {field.name for field in fields(DeviceProfile)}
    found = [_unknown(key, known) for key in raw if key not in known]
    found += [
        f"{field.name} is missing"
        for field in fields(DeviceProfile)
        if field.name not in raw and field.default is MISSING
    ]
    if raw.get("family", FAMILIES[0]) not in FAMILIES:
        found.append(f"family is {raw['family']!r}; expected one of {', '.join(FAMILIES)}")
    for key, value in raw.items():
        if key in ("domain_link", "scale_out_link"):
            found += _link_problems(key, value)
        elif key in known - {"name", "family"} and not (isinstance(value, int | float) and value > 0):
            found.append(f"{key} is {value!r}; expected a number above 0")
    node, domain = raw.get("devices_per_node"), raw.get("domain_devices")
    if isinstance(node, int) and isinstance(domain, int) and domain < node:
        found.append(f"domain_devices is {domain}, below devices_per_node {node}: the fast links join at least a node")
    return found


def _link_problems(key: str, value: Any) -> list[str]:
    names = {field.name for field in fields(Link)}
    if not isinstance(value, dict):
        return [f"{key} is {value!r}; expected a table with {' and '.join(sorted(names))}"]
    found = [_unknown(name, names, f"{key}.") for name in value if name not in names]
    return found + [
        f"{key}.{name} is {value.get(name)!r}; expected a number above 0"
        for name in sorted(names)
        if not (isinstance(value.get(name), int | float) and value[name] > 0)
    ]


def _unknown(key: str, known: set[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return f"unknown key {prefix}{key}; the nearest known key is {prefix}{near[0]}"
