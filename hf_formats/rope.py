"""Rotary positions as config.json describes them: plain (arXiv 2104.09864), YaRN (arXiv 2309.00071), Llama 3's.

Frequencies are computed in float64 and rounded once by the caller, so that both engines rotate by the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DEFAULT_THETA = 10000.0


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions under config.json's names. An ``mscale`` or ``mscale_all_dim`` of 0 counts as absent."""

    rope_type: str = "default"  # or "yarn", "llama3"
    rope_theta: float = DEFAULT_THETA
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    @property
    def amplitude(self) -> float:
        """The factor on cos and sin, as transformers has it: without both mscales it is that of ``mscale`` 1."""
        if self.rope_type != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)

    def softmax_scale(self, head_size: int) -> float:
        """Return the factor on q k^T: 1 / sqrt(head size), with YaRN times yarn_mscale(factor, mscale_all_dim)^2."""
        scale = 1.0 / math.sqrt(head_size)
        if self.rope_type == "yarn":
            scale *= yarn_mscale(self.factor, self.mscale_all_dim) ** 2
        return scale

    def inverse_frequencies(self, rope_dim: int) -> list[float]:
        """Return the angle per position of each rotated pair, ``rope_dim / 2`` values.

        YaRN keeps pairs that turn at least ``beta_fast`` times within the original context, divides by ``factor`` those
        that turn at most ``beta_slow`` times, and blends linearly, by the pair's number, in between. Llama 3 (arXiv
        2407.21783) does so with ``high_freq_factor`` and ``low_freq_factor``, and blends by the number of turns.
        """
        plain = [self.rope_theta ** (-2 * i / rope_dim) for i in range(rope_dim // 2)]
        if self.rope_type == "default":
            return plain
        if self.rope_type == "llama3":
            turns = [self.original_max_position_embeddings * f / (2 * math.pi) for f in plain]
            width = self.high_freq_factor - self.low_freq_factor
            kept = [min(max((t - self.low_freq_factor) / width, 0.0), 1.0) for t in turns]
            return [f * share + f / self.factor * (1 - share) for f, share in zip(plain, kept, strict=True)]

        def pair_that_turns(times: float) -> float:
            wavelength = self.original_max_position_embeddings / (times * 2 * math.pi)
            return rope_dim * math.log(wavelength) / (2 * math.log(self.rope_theta))

        low = max(math.floor(pair_that_turns(self.beta_fast)), 0)
        high = min(math.ceil(pair_that_turns(self.beta_slow)), rope_dim - 1)
        width = (high - low) or 0.001  # a step instead of a ramp, without a division by zero
        slowed = [min(max((i - low) / width, 0.0), 1.0) for i in range(rope_dim // 2)]
        return [f * (1 - share) + f / self.factor * share for f, share in zip(plain, slowed, strict=True)]


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's attention temperature: 0.1 mscale ln(factor) + 1, and 1 when nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_scaling(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return config.json's description of scaled rotary positions, None when they are plain.

    ``rope_parameters`` is the name in transformers 5, ``rope_scaling`` the one before.
    """
    scaling = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    scaling["rope_type"] = scaling.pop("type", None) or scaling.get("rope_type") or "default"
    return None if scaling["rope_type"] == "default" else scaling


SCALED_BY = {
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
"""rope_type -> the keys that it cannot do without"""
_OPTIONAL = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor")


def rope_problems(raw: Mapping[str, Any], supported: Sequence[str]) -> list[str]:
    """Return what is wrong with the scaling that config.json asks for, one sentence per problem.

    supported: the types of scaling that the model's attention has.
    """
    scaling = rope_scaling(raw)
    if scaling is None:
        return []
    rope_type = scaling["rope_type"]
    if rope_type not in supported:
        return [f"rope_scaling type is {rope_type!r}; {', '.join(supported)} or null is needed"]
    found = [f"rope_scaling.{key} is missing" for key in SCALED_BY[rope_type] if not scaling.get(key)]
    if not found and rope_type == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        found.append("rope_scaling.high_freq_factor must be larger than low_freq_factor")
    if scaling.get("attention_factor") is not None:
        found.append("rope_scaling.attention_factor is given; only the factor that mscale describes is supported")
    return found


def parse_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Return the rotary positions of a config.json without ``rope_problems``."""
    theta = float(raw.get("rope_theta") or (raw.get("rope_parameters") or {}).get("rope_theta") or DEFAULT_THETA)
    scaling = rope_scaling(raw)
    if scaling is None:
        return RopeConfig(rope_theta=theta)
    return RopeConfig(
        rope_type=scaling["rope_type"],
        rope_theta=theta,
        factor=float(scaling["factor"]),
        original_max_position_embeddings=int(scaling["original_max_position_embeddings"]),
        **{key: float(scaling[key]) for key in _OPTIONAL if scaling.get(key)},
    )
