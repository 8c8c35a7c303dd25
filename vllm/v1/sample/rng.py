"""Counter-based noise for sampling: every draw is a function of (request seed, token position, vocabulary index) alone.

Row keys: (a, b) = the halves of splitmix64(splitmix64(seed) + position), on the host, vectorised over the batch.
Vocabulary keys: h_v = the low half of splitmix64(v), made once.
Noise: x = (a ^ h_v) * 747796405; x ^= x >>> 15; x = (x + b) * 277803737; x ^= x >> 15, all modulo 2^32; the last,
arithmetic shift leaves 31 evenly used bits. u = (x + 1/2) 2^-31 in (0, 1), E = -log(1 - u) is exponential.
A draw from p is argmax_v p_v / E_v (the exponential race, equal in law to the Gumbel-max trick): v wins with
probability p_v / sum p. A change of p by rounding changes the winner only with a probability of the size of the change,
so results are stable under another batch composition or layout; and fp32 keeps E's relative precision where it matters,
near 0.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_LOW_15_BITS, _LOW_17_BITS, _LOW_64_BITS = 0x7FFF, 0x1FFFF, 2**64 - 1


def splitmix64(x: np.ndarray) -> np.ndarray:
    """Steele, Lea and Flood's 64-bit mixing function (OOPSLA 2014), element-wise on uint64."""
    z = x + GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def derive_seed(seed: int, *parts: int) -> int:
    """A 64-bit seed for a child of `seed`, e.g. its i-th sample; different for every different list of parts."""
    state = seed % 2**64
    for part in parts:
        state = mixed(mixed(state) + part)
    return state


def mixed(x: int) -> int:
    """`splitmix64` of one number, modulo 2^64."""
    z = (x + int(GOLDEN)) & _LOW_64_BITS
    z = ((z ^ (z >> 30)) * int(_MIX_1)) & _LOW_64_BITS
    z = ((z ^ (z >> 27)) * int(_MIX_2)) & _LOW_64_BITS
    return z ^ (z >> 31)


def position_keys(mixed_seeds_B: np.ndarray, positions_B: np.ndarray) -> np.ndarray:
    """int32 [B, 2] noise keys of rows that sample their `positions_B`-th output token; of several positions each with
    `positions_B` [S, B], S * B. The seeds, uint64, are mixed: `splitmix64` of the rows' own.
    """
    return splitmix64(mixed_seeds_B + positions_B.astype(np.uint64)).view(np.int32).reshape(-1, 2)


def vocab_keys(vocab_size: int) -> np.ndarray:
    """int32 [W] noise keys of the vocabulary."""
    return splitmix64(np.arange(vocab_size, dtype=np.uint64)).view(np.int32).reshape(-1, 2)[:, 0].copy()


def exponential_noise(keys_B2: Tensor, vocab_keys_W: Tensor) -> Tensor:
    """fp32 [B, W] independent Exp(1) draws of the keys."""
    x_BW = keys_B2[:, :1] ^ vocab_keys_W
    x_BW.mul_(747796405)
    x_BW.bitwise_xor_(_shifted_right_15(x_BW).bitwise_and_(_LOW_17_BITS))
    x_BW.add_(keys_B2[:, 1:]).mul_(277803737)
    x_BW.bitwise_xor_(_shifted_right_15(x_BW))
    u_BW = x_BW.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return u_BW.neg_().log1p_().neg_()


def _shifted_right_15(x: Tensor) -> Tensor:
    """``x >> 15`` of int32, exactly: Ascend's vector cores have no integer shift; fp32 holds the 17 bits that stay."""
    return x.bitwise_and(~_LOW_15_BITS).to(torch.float32).mul_(2.0**-15).to(torch.int32)
