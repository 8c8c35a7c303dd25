"""LoRARequest, which clients import even if they use no adapter."""

from __future__ import annotations


class LoRARequest:
    """Raises ValueError: this engine loads no LoRA adapters."""

    def __init__(self, lora_name: str, lora_int_id: int, lora_path: str = "") -> None:
        raise ValueError(
            f"LoRARequest({lora_name!r}): LoRA adapters are not supported; merge the adapter into the weights first"
        )
