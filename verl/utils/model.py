"""Small functions about models and their configs (upstream: ``verl.utils.model``)."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

_SCALES = {"B": 1e9, "M": 1e6, "K": 1e3, "": 1.0}


class LambdaLayer(nn.Module):
    """A function as a module."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


def squeeze(x: Tensor) -> Tensor:
    """Without the last dimension, which is 1."""
    return x.squeeze(-1)


def update_model_config(module_config: Any, override_config_kwargs: dict[str, Any]) -> None:
    """Sets every key of the dict, in place; inner dicts go into the sections of that name."""
    for key, value in override_config_kwargs.items():
        if isinstance(value, dict) and not isinstance(getattr(module_config, key), dict):
            update_model_config(getattr(module_config, key), value)
        else:
            setattr(module_config, key, value)


def get_huggingface_actor_config(
    model_name: str, override_config_kwargs: dict[str, Any] | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """The config of a model with some keys overridden; its code is executed only with ``trust_remote_code``."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_name, trust_remote_code=trust_remote_code)
    update_model_config(config, override_config_kwargs or {})
    return config


def get_generation_config(model: str, trust_remote_code: bool = False) -> GenerationConfig | None:
    """generation_config.json of a model, else what its config.json says of generation; None without both."""
    from transformers import GenerationConfig

    with contextlib.suppress(OSError):  # no such file
        return GenerationConfig.from_pretrained(model)
    try:
        return GenerationConfig.from_model_config(
            get_huggingface_actor_config(model, trust_remote_code=trust_remote_code)
        )
    except (OSError, ValueError):  # no config.json, or one without a model type
        return None


def get_model_size(model: nn.Module, scale: str = "auto") -> tuple[float, str]:
    """(number of parameters in units of ``scale``, the unit): B, M, K or none; ``auto`` takes the largest that fits."""
    count = sum(parameter.numel() for parameter in model.parameters())
    if scale == "auto":
        scale = next((name for name, size in _SCALES.items() if count > size), "")
    if scale not in _SCALES:
        raise ValueError(f"scale is {scale!r}; expected auto, {', '.join(repr(name) for name in _SCALES)}")
    return count / _SCALES[scale], scale


def print_model_size(model: nn.Module, name: str | None = None) -> None:
    size, scale = get_model_size(model)
    print(f"{name or type(model).__name__} contains {size:.2f}{scale} parameters")


def create_random_mask(
    input_ids: Tensor,
    max_ratio_of_valid_token: float,
    max_ratio_of_left_padding: float,
    min_ratio_of_valid_token: float = 0,
) -> Tensor:
    """A mask [B, S] of rows that are padded on both sides, drawn with torch's global generator.

    Args:
        input_ids: [B, S].
        max_ratio_of_valid_token, min_ratio_of_valid_token: bounds of the share of a row that is not padding.
        max_ratio_of_left_padding: bound of the share that is padding on the left.
    """
    rows, length = input_ids.shape
    most, least = int(length * max_ratio_of_valid_token), int(length * min_ratio_of_valid_token)
    most_left = int(length * max_ratio_of_left_padding)
    if not (0 < max_ratio_of_valid_token <= 1 and 0 <= max_ratio_of_left_padding < 1 and least < most):
        raise ValueError(
            f"shares of valid tokens {min_ratio_of_valid_token} to {max_ratio_of_valid_token} and of left padding up "
            f"to {max_ratio_of_left_padding} leave no row of {length} tokens"
        )
    mask = torch.zeros_like(input_ids, dtype=torch.int64)
    for row in range(rows):
        left = int(torch.randint(0, most_left + 1, ()))
        valid = int(torch.randint(max(least, 1), most + 1, ()))
        mask[row, left : left + valid] = 1
    return mask


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Positions [B, S] that count the tokens of ``mask``, 0 on padding at the left."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def convert_weight_keys(state_dict: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors under their names in the checkpoint, by the model's ``_checkpoint_conversion_mapping``."""
    mapping: dict[str, str] = getattr(model, "_checkpoint_conversion_mapping", None) or {}
    reverse = {value: key for key, value in mapping.items()}
    found = {}
    for name, tensor in state_dict.items():
        for pattern, replacement in reverse.items():
            # The mapping's keys are regular expressions: without anchor and lookahead they are the names.
            plain = re.sub(r"\(.*?\)", "", replacement.lstrip("^"))
            name, count = re.subn(f"^{pattern.lstrip('^')}", plain, name)
            if count:
                break
        found[name] = tensor
    return found


def pad_packed_inputs(
    unpad_tokens: Tensor, cu_seqlens: Tensor, max_seqlen_in_batch: int, size: int
) -> tuple[Tensor, Tensor, int]:
    """Packed tokens [N, ...], with zeros up to a multiple of ``size``, which become part of the last sequence."""
    missing = -unpad_tokens.shape[0] % size
    if not missing:
        return unpad_tokens, cu_seqlens, max_seqlen_in_batch
    padding = unpad_tokens.new_zeros(missing, *unpad_tokens.shape[1:])
    ends = cu_seqlens.clone()
    ends[-1] += missing
    longest = max(max_seqlen_in_batch, int(ends[-1] - ends[-2]))
    return torch.cat([unpad_tokens, padding]), ends, longest
