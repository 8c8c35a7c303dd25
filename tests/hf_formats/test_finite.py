"""Non-finite weights are found in every dtype and at every place, and named; finite ones pass."""

from __future__ import annotations

import pytest
import torch

from hf_formats.finite import require_finite

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2, torch.float8_e4m3fn)


def weight(dtype: torch.dtype, shape: tuple[int, ...] = (5, 7)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_and_infinity_are_found_in_every_dtype(dtype: torch.dtype) -> None:
    require_finite("w", weight(dtype), "file")
    values = [float("nan"), -float("nan")] + ([] if dtype == torch.float8_e4m3fn else [float("inf"), -float("inf")])
    for value in values:
        bad = weight(dtype)
        bad[3, 4] = torch.tensor(value).to(dtype)
        with pytest.raises(ValueError, match=r"weight a\.b of model-1 is (nan|inf|-inf) at \(3, 4\)"):
            require_finite("a.b", bad, "model-1")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_finite_values_pass(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    values = torch.tensor([limits.max, limits.min, limits.tiny, -0.0], dtype=torch.float64)
    require_finite("w", values.to(dtype), "file")


def test_every_bit_pattern_of_two_bytes_is_judged_as_torch_judges_it() -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        values = patterns.view(dtype)
        is_finite = torch.isfinite(values)
        require_finite("w", values[is_finite], "file")
        for one in values[~is_finite][::101]:
            with pytest.raises(ValueError, match="weight w of file"):
                require_finite("w", one, "file")


def test_views_large_and_empty_tensors_and_integers_are_looked_at_in_parts() -> None:
    large = torch.zeros(1 << 20, 3)
    large[-1, -1] = float("inf")
    with pytest.raises(ValueError, match=r"inf at \(1048575, 2\)"):
        require_finite("w", large, "file")
    require_finite("w", large[:, :2], "file")
    with pytest.raises(ValueError, match=r"inf at \(2, 1048575\)"):
        require_finite("w", large.T, "file")
    for passed in (torch.empty(0, 4), torch.empty(4, 0).T, torch.tensor([1, 2]), torch.tensor(True), torch.tensor(1.0)):
        require_finite("w", passed, "file")
